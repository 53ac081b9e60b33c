//! Layouts: the targets over which files are spread, and those that new files in a directory get.

use crate::error::MetaError;
use crate::inode::{FileKind, Inode};
use crate::parts::Parts;
use crate::{PATH_MAX, ROOT};
use penstock_base::{FileId, Ino, TargetId};
use penstock_kv::WriteSet;
use penstock_session::Request;
use rustix::io::Errno;

/// A layout as an administrator asks for it. What is none stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WantedLayout {
    /// Number of targets; 0 for all that there are when a file is made.
    pub count: Option<u16>,
    /// Chunks in a row on one target.
    pub turn: Option<u16>,
}

/// The layout of a file, or that of new files in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutInfo {
    /// The inode.
    pub ino: Ino,
    /// True for a directory.
    pub is_directory: bool,
    /// Number of targets. In a directory 0 stands for all that there are when a file is made.
    pub count: u16,
    /// Chunks in a row on one target.
    pub turn: u16,
    /// Blocks in a chunk.
    pub chunk_blocks: u32,
    /// The targets of a file, in their order; none for a directory.
    pub targets: Vec<TargetId>,
    /// A file has something on other targets than that of the names' stack, or may have.
    pub is_spread: bool,
}

/// The inode at a path from the root. Symbolic links are not followed.
async fn resolve(parts: &Parts, path: &[u8]) -> Result<Ino, MetaError> {
    if path.len() > PATH_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    let mut at = ROOT;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        parts.names.directory(at).await?;
        let (_, entry) = parts.names.find(at, name).await?.entry.ok_or(Errno::NOENT)?;
        at = entry.ino;
    }
    Ok(at)
}

fn info(parts: &Parts, inode: &Inode) -> LayoutInfo {
    let is_directory = inode.is_dir();
    let spread = parts.elsewhere.spread_of(&inode.layout).filter(|_| !is_directory);
    LayoutInfo {
        ino: inode.ino,
        is_directory,
        count: inode.layout.count,
        turn: inode.layout.turn,
        chunk_blocks: inode.layout.chunk_blocks,
        targets: spread.into_iter().flat_map(|spread| spread.all()).collect(),
        is_spread: inode.is_spread,
    }
}

/// The layout at a path from the root.
pub(crate) async fn show(parts: &Parts, path: &[u8]) -> Result<LayoutInfo, MetaError> {
    let inode = parts.names.inode(resolve(parts, path).await?).await?;
    match inode.kind() {
        FileKind::Regular | FileKind::Directory => Ok(info(parts, &inode)),
        _ => Err(MetaError::Request("only files and directories have a layout".into())),
    }
}

/// Changes the layout that new files in a directory get, or that of a file without data.
pub(crate) async fn set(parts: &Parts, path: &[u8], wanted: WantedLayout) -> Result<LayoutInfo, MetaError> {
    if !parts.elsewhere.are_several() {
        // Nor does a release before layouts know any other.
        return Err(MetaError::Request("this store has one target, which has all files".into()));
    }
    let ino = resolve(parts, path).await?;
    let turn = parts.names.turn().await;
    let mut inode = turn.inode(ino).await?;
    let mut layout = inode.layout;
    layout.turn = wanted.turn.unwrap_or(layout.turn);
    layout.count = wanted.count.unwrap_or(layout.count);
    let targets = parts.elsewhere.all().count();
    if layout.turn == 0 || usize::from(layout.count) > targets {
        return Err(MetaError::Request(format!(
            "{} targets with {} chunks in a row: there are {targets} targets, and at least one chunk lies on each in a row",
            layout.count, layout.turn
        )));
    }
    match inode.kind() {
        FileKind::Directory => inode.layout = layout,
        FileKind::Regular => {
            let held = parts.chunks.held_blocks(vec![FileId::main(ino)]).await?;
            if inode.is_spread || inode.size > 0 || held != [0] || parts.is_used(ino) {
                return Err(MetaError::Request(
                    "the layout of a file can be changed while it is empty, was never longer, and nobody has it open"
                        .into(),
                ));
            }
            inode.layout = parts.elsewhere.layout_of_new(&layout, FileKind::Regular, parts.chunks.usage());
        }
        _ => return Err(MetaError::Request("only files and directories have a layout".into())),
    }
    let mut writes = WriteSet::new();
    writes.changes_what_is_there();
    turn.commit(Request::default(), writes, vec![inode.clone()], &[]).await?;
    drop(turn);
    parts.flush().await?;
    Ok(info(parts, &inode))
}
