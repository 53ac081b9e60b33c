//! Reports of pools.
//!
//! A store has one pool today: the drives, and the arrays of all stacks on them.

use crate::node::Node;
use crate::report::PoolReport;
use penstock_array::format::descriptor::Role;
use penstock_array::{Array, ArrayState, Report};
use penstock_base::{BLOCK_BYTES, DriveId, PoolId};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// The name of the pool of a store.
const NAME: &str = "main";

/// Reports of all pools of a store.
pub(crate) fn reports(node: &Node) -> Vec<PoolReport> {
    let mut pools: BTreeMap<PoolId, Vec<Rc<Array>>> = BTreeMap::new();
    for array in node.arrays() {
        pools.entry(array.pool()).or_default().push(array.clone());
    }
    pools.into_iter().map(|(pool, arrays)| report(node, pool, &arrays)).collect()
}

fn is_online(node: &Node, drive: DriveId) -> bool {
    node.drives().iter().any(|known| known.id() == drive && known.is_online())
}

fn report(node: &Node, pool: PoolId, arrays: &[Rc<Array>]) -> PoolReport {
    let data = arrays.iter().find(|array| array.role() == Role::Data).expect("a stack has a data array");
    let reports: Vec<Report> = arrays.iter().map(|array| array.report()).collect();
    let of_data = data.report();
    let worst = reports.iter().map(|report| report.state).max().unwrap_or(ArrayState::Ok);
    let drives: BTreeSet<DriveId> =
        reports.iter().flat_map(|report| report.members.iter().map(|member| member.drive)).collect();
    let online: Vec<DriveId> = drives.iter().copied().filter(|drive| is_online(node, *drive)).collect();
    let survives = |drive: &&DriveId| arrays.iter().all(|array| array.survives(&[**drive]));
    let (space, (k, m)) = (node.usage(), of_data.code);
    PoolReport {
        name: NAME.to_owned(),
        state: worst.word().to_owned(),
        code: format!("{k}+{m}"),
        layout: of_data.layout,
        targets: node.stacks.len() as u64,
        drives: drives.len() as u64,
        drives_online: online.len() as u64,
        may_be_lost: online.iter().filter(survives).count() as u64,
        strip_bytes: data.geometry().strip_bytes() as u64,
        stripe_bytes: of_data.stripe_bytes,
        total_bytes: space.total_blocks * BLOCK,
        free_bytes: space.free_blocks * BLOCK,
        redundancy_debt_stripes: reports.iter().map(|report| report.redundancy_debt_stripes).sum(),
        is_counted: reports.iter().all(|report| report.is_counted),
        settings: node.settings.of(pool),
        arrays: reports.iter().map(|report| report.name.clone()).collect(),
    }
}
