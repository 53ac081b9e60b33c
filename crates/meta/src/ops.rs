//! The operations on names, one family per file. Each takes a decoded request and returns an encoded reply.

mod acl;
pub(crate) mod forget;
pub(crate) mod layout;
mod links;
mod readdir;
mod rename;
mod setattr;
mod xattr;

pub(crate) use links::{link, lookup, make, unlink};
pub(crate) use readdir::{read_dir, read_link};
pub(crate) use rename::rename;
pub(crate) use setattr::{cut_tail, get_attr, may_set, set_attr, stat_fs};
pub(crate) use xattr::{get_xattr, has_capabilities, list_xattr, remove_xattr, set_xattr};

use crate::error::MetaError;
use crate::inode::Inode;
use crate::parts::Parts;
use penstock_wire::metadata::{Attr, AttrReply, Change};
use prost::Message;

/// Encodes the reply to a change, with an inode's attributes.
async fn changed_reply(parts: &Parts, change: Change, inode: &Inode) -> Result<Vec<u8>, MetaError> {
    Ok(encode_changed(change, parts.attr(inode).await?))
}

fn encode_changed(change: Change, attr: Attr) -> Vec<u8> {
    AttrReply { attr: Some(attr), change: Some(change), ..AttrReply::default() }.encode_to_vec()
}

/// Adds the directory after a change to the encoded reply. The result that is stored does without it.
fn with_directory(reply: &mut Vec<u8>, dir: Attr) {
    let added = AttrReply { dir: Some(dir), ..AttrReply::default() };
    added.encode(reply).expect("a vector grows");
}

fn encode_attr(attr: Attr) -> Vec<u8> {
    AttrReply { attr: Some(attr), ..AttrReply::default() }.encode_to_vec()
}
