//! Reports of pools.
//!
//! A store has one pool today: the drives, the array with its data, and the mirrors with its metadata.

use crate::node::Node;
use crate::report::PoolReport;
use penstock_array::format::descriptor::Role;
use penstock_array::{Array, ArrayState};
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
    let worst = arrays.iter().map(|array| array.report().state).max().unwrap_or(ArrayState::Ok);
    let drives: Vec<DriveId> = data.report().members.iter().map(|member| member.drive).collect();
    let online: Vec<DriveId> = drives.iter().copied().filter(|drive| is_online(node, *drive)).collect();
    let survives = |drive: &&DriveId| arrays.iter().all(|array| array.survives(&[**drive]));
    let (geometry, space) = (data.geometry(), node.target.usage());
    let strip_bytes = geometry.strip_bytes() as u64;
    let names: BTreeSet<String> = arrays.iter().map(|array| array.name().to_owned()).collect();
    PoolReport {
        name: NAME.to_owned(),
        state: worst.word().to_owned(),
        code: format!("{}+{}", geometry.k, geometry.m),
        layout: data.layout().describe(),
        drives: drives.len() as u64,
        drives_online: online.len() as u64,
        may_be_lost: online.iter().filter(survives).count() as u64,
        strip_bytes,
        stripe_bytes: geometry.k as u64 * strip_bytes,
        total_bytes: space.total_blocks * BLOCK,
        free_bytes: space.free_blocks * BLOCK,
        redundancy_debt_stripes: arrays.iter().map(|array| array.redundancy_debt_stripes()).sum(),
        is_counted: arrays.iter().all(|array| array.report().is_counted),
        arrays: names.into_iter().collect(),
    }
}
