//! Serves requests about a directory that was removed through this mount, for programs that are in it or have
//! it open. Nothing reaches the service: a crash may have brought a directory of this number back, which is
//! another one for them.

use crate::abi::{GetxattrIn, op};
use crate::attr::{attributes, extended};
use crate::attributes::{changed, is_of_the_kernel};
use crate::device::{Answer, Request};
use crate::listing;
use crate::session::Session;
use penstock_client::Attr;
use rustix::io::Errno;
use std::time::Duration;

/// Serves a request about a dead node with these last attributes. The kernel lists and looks up nothing in it
/// by itself.
pub(crate) async fn serve(session: &Session, request: &Request, attr: &Attr) -> Result<Answer, Errno> {
    let nodes = &session.nodes;
    match request.header.opcode {
        op::GETATTR => Ok(Answer::of(&attributes(nodes, attr, Duration::ZERO))),
        op::STATX => Ok(Answer::of(&extended(nodes, attr, Duration::ZERO))),
        op::SETATTR => {
            let attr = changed(attr.clone(), &session.change_of(request)?, session.client.now());
            nodes.keep(request.header.nodeid, &attr);
            Ok(Answer::of(&attributes(nodes, &attr, Duration::ZERO)))
        }
        op::GETXATTR if is_of_the_kernel(request.name(size_of::<GetxattrIn>(), 0)?) => Err(Errno::NODATA),
        // These are about the whole file system.
        op::STATFS => session.statfs().await,
        op::FSYNCDIR => session.fsyncdir().await,
        // The kernel lists nothing in it.
        op::OPENDIR => Ok(listing::open()),
        op::RELEASEDIR => Ok(Answer::Done),
        op::FORGET => session.forget(request),
        _ => Err(Errno::STALE),
    }
}
