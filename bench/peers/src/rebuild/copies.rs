//! Measures the rate that the drives allow: plain copies that read k drives and write one, as a rebuild does.
//!
//! The drive that is written has failed and is about to be replaced. Its file is made empty first, like that
//! of the drive that replaces it, so the copies also write to unallocated places. They read only data.

use anyhow::{Context, Result, anyhow, ensure};
use rustix::fs::{OFlags, SeekFrom};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Length of each read and write in bytes: one strip.
pub(crate) const STRIP_BYTES: usize = 256 << 10;

/// Makes a drive's file empty and copies `strips` strips onto it. Returns the seconds until they are durable.
pub(crate) fn run(from: &[PathBuf], to: &Path, strips: usize, threads: usize) -> Result<f64> {
    let readers = from.iter().map(|path| open(path)).collect::<Result<Vec<File>>>()?;
    let writer = open(to)?;
    let len = writer.metadata()?.len();
    writer.set_len(0)?;
    writer.set_len(len)?;
    let places = places(readers.first().context("there is a drive to read")?, strips)?;
    ensure!(places.len() == strips, "the drives hold {} strips and not {strips}", places.len());
    let next = AtomicUsize::new(0);
    let copy = || -> Result<()> {
        let mut buffers: Vec<_> =
            readers.iter().map(|_| penstock_base::BufMut::zeroed(STRIP_BYTES)).collect();
        while let Some(at) = places.get(next.fetch_add(1, Ordering::Relaxed)) {
            for (file, buffer) in readers.iter().zip(&mut buffers) {
                file.read_exact_at(buffer.as_mut(), *at)?;
            }
            writer.write_all_at(buffers[0].as_ref(), *at)?;
        }
        Ok(())
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(copy)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a copy panicked"))?)
    })?;
    writer.sync_data()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Opens a file with O_DIRECT, or without it if the file system does not support that.
fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let direct = options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(path);
    direct.or_else(|_| options.open(path)).with_context(|| format!("{} cannot be opened", path.display()))
}

/// Returns the offsets of the first strips that hold only data: reading a hole costs less.
fn places(file: &File, wanted: usize) -> Result<Vec<u64>> {
    const STEP: u64 = STRIP_BYTES as u64;
    let mut places = Vec::new();
    let mut at = 0;
    while places.len() < wanted {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.next_multiple_of(STEP),
            // There is no data behind this offset.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let Ok(hole) = rustix::fs::seek(file, SeekFrom::Hole(at)) else { break };
        while at + STEP <= hole && places.len() < wanted {
            places.push(at);
            at += STEP;
        }
        at = at.max(hole);
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_are_copied_where_there_is_data() {
        let folder = std::env::temp_dir().join(format!("peers-copies-{}", std::process::id()));
        let _held = crate::guard::Guard::folder(&folder).unwrap();
        let [a, b, to] = ["a", "b", "to"].map(|name| folder.join(name));
        for (path, fill) in [(&a, 1), (&b, 2)] {
            let file = File::create(path).unwrap();
            file.set_len(8 * STRIP_BYTES as u64).unwrap();
            file.write_all_at(&vec![fill; 3 * STRIP_BYTES], 4 * STRIP_BYTES as u64).unwrap();
        }
        std::fs::write(&to, vec![3; 8 * STRIP_BYTES]).unwrap();
        run(&[a.clone(), b], &to, 3, 2).unwrap();
        let expected = [vec![0; 4 * STRIP_BYTES], vec![1; 3 * STRIP_BYTES], vec![0; STRIP_BYTES]].concat();
        assert!(std::fs::read(&to).unwrap() == expected);
        assert!(run(&[a], &to, 9, 1).unwrap_err().to_string().contains("and not 9"));
    }
}
