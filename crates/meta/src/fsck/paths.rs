//! Paths of inodes, found from the directory entries.
//!
//! An inode does not store its path, so all names are read: twice, for any number of inodes.

use crate::ROOT;
use crate::error::MetaError;
use crate::inode::{DIRECTORY, Inode};
use crate::rows::{Entry, all_entries, decode_entry_key, inode_key};
use penstock_base::Ino;
use penstock_kv::{KvRead, for_each};
use std::collections::{BTreeMap, BTreeSet};

/// Most components of a path that is written out.
const DEEPEST: usize = 1000;
/// Most names of one inode that are listed.
const MOST_NAMES: usize = 16;

type Places = BTreeMap<Ino, Vec<(Ino, Vec<u8>)>>;

/// Returns paths of inodes, from the root. An inode without a name has none. A path that cannot be
/// followed up to the root begins with the number of the last directory that was found.
pub(crate) async fn find(
    kv: &dyn KvRead,
    inos: &BTreeSet<Ino>,
) -> Result<BTreeMap<Ino, Vec<String>>, MetaError> {
    if inos.is_empty() {
        return Ok(BTreeMap::new());
    }
    let places = places_of(kv, |ino, _| inos.contains(&ino)).await?;
    let mut above = BTreeSet::new();
    for (dir, _) in places.values().flatten() {
        add_ancestors(kv, *dir, &mut above).await?;
    }
    let directories = places_of(kv, |ino, kind| kind == DIRECTORY && above.contains(&ino)).await?;
    let mut paths: BTreeMap<Ino, Vec<String>> = BTreeMap::new();
    for (ino, places) in &places {
        let path = |(dir, name): &(Ino, Vec<u8>)| path_of(*dir, name, &directories);
        paths.insert(*ino, places.iter().map(path).collect());
    }
    if inos.contains(&ROOT) {
        paths.insert(ROOT, vec!["/".to_owned()]);
    }
    Ok(paths)
}

/// Directory and name of each entry that refers to a wanted inode.
async fn places_of(kv: &dyn KvRead, wanted: impl Fn(Ino, u32) -> bool) -> Result<Places, MetaError> {
    let mut places = Places::new();
    for_each(kv, all_entries(), |key, value| {
        // An entry that cannot be read gives no path; a check reports it.
        if let (Ok((dir, _)), Ok(entry)) = (decode_entry_key(key), Entry::decode(value))
            && wanted(entry.ino, entry.kind)
        {
            let names = places.entry(entry.ino).or_default();
            if names.len() < MOST_NAMES {
                names.push((dir, entry.name));
            }
        }
        Ok::<_, MetaError>(())
    })
    .await?;
    Ok(places)
}

async fn add_ancestors(kv: &dyn KvRead, dir: Ino, above: &mut BTreeSet<Ino>) -> Result<(), MetaError> {
    let mut at = dir;
    while at != ROOT && above.insert(at) {
        let row = kv.get(inode_key(at)).await?;
        match row.and_then(|row| Inode::decode_at(at, &row).ok()) {
            Some(inode) => at = inode.parent,
            None => break,
        }
    }
    Ok(())
}

fn path_of(dir: Ino, name: &[u8], directories: &Places) -> String {
    let mut words = vec![String::from_utf8_lossy(name).into_owned()];
    let mut at = dir;
    while at != ROOT {
        match directories.get(&at).and_then(|places| places.first()) {
            Some((above, name)) if words.len() < DEEPEST => {
                words.push(String::from_utf8_lossy(name).into_owned());
                at = *above;
            }
            _ => {
                words.push(format!("(inode {at})"));
                words.reverse();
                return words.join("/");
            }
        }
    }
    words.push(String::new());
    words.reverse();
    words.join("/")
}
