//! Reports of pools.
//!
//! A store has one pool today: the drives, the array with its data, and the mirrors with its metadata.

use crate::node::Node;
use crate::report::PoolReport;
use penstock_array::format::descriptor::Role;
use penstock_array::{Array, ArrayState, Report};
use penstock_base::{BLOCK_BYTES, DriveId};
use std::collections::BTreeSet;
use std::rc::Rc;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// The name of the pool of a store.
const NAME: &str = "main";

/// Reports of all pools of a store.
pub(crate) fn reports(node: &Node) -> Vec<PoolReport> {
    let data = node.arrays().iter().filter(|array| array.role() == Role::Data);
    data.map(|data| report(node, data)).collect()
}

fn is_online(node: &Node, drive: DriveId) -> bool {
    node.drives().iter().any(|known| known.id() == drive && known.is_online())
}

fn report(node: &Node, data: &Rc<Array>) -> PoolReport {
    let of_pool = |array: &&Rc<Array>| array.pool() == data.pool();
    let arrays: Vec<Rc<Array>> = node.arrays().iter().filter(of_pool).cloned().collect();
    let reports: Vec<Report> = arrays.iter().map(|array| array.report()).collect();
    let of_data = data.report();
    let worst = reports.iter().map(|report| report.state).max().unwrap_or(ArrayState::Ok);
    let drives: Vec<DriveId> = of_data.members.iter().map(|member| member.drive).collect();
    let online: Vec<DriveId> = drives.iter().copied().filter(|drive| is_online(node, *drive)).collect();
    let survives = |drive: &&DriveId| arrays.iter().all(|array| array.survives(&[**drive]));
    let (space, (k, m)) = (node.target.usage(), of_data.code);
    let names: BTreeSet<String> = reports.iter().map(|report| report.name.clone()).collect();
    PoolReport {
        name: NAME.to_owned(),
        state: worst.word().to_owned(),
        code: format!("{k}+{m}"),
        layout: of_data.layout,
        drives: drives.len() as u64,
        drives_online: online.len() as u64,
        may_be_lost: online.iter().filter(survives).count() as u64,
        strip_bytes: data.geometry().strip_bytes() as u64,
        stripe_bytes: of_data.stripe_bytes,
        total_bytes: space.total_blocks * BLOCK,
        free_bytes: space.free_blocks * BLOCK,
        redundancy_debt_stripes: reports.iter().map(|report| report.redundancy_debt_stripes).sum(),
        is_counted: reports.iter().all(|report| report.is_counted),
        settings: node.settings.of(data.pool()),
        arrays: names.into_iter().collect(),
    }
}
