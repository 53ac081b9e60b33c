use super::*;
use crate::tests::{
    CHUNK, OWNER, Random, STRIPE, Seed, blocks_of, chunk_key, extent, file, map_row, preallocated,
};
use futures_util::FutureExt;
use penstock_base::{Birth, ErrorKind, LocalBoxFuture};
use penstock_kv::{KvError, KvRead, MemKv, Row, Usage, WriteSet};
use penstock_sim::seeds;
use std::pin::pin;
use std::task::Poll;

const VOLUME_BLOCKS: u64 = 1000;

fn groups() -> Rc<Cell<Groups>> {
    Rc::new(Cell::new(Groups::new(VOLUME_BLOCKS, STRIPE)))
}

fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("a store in memory never waits")
}

/// An empty cache over an empty store.
fn empty() -> (Rc<MemKv>, Rc<ChunkCache>) {
    let mem = MemKv::new(1 << 24);
    let kv: Rc<dyn Kv> = mem.clone();
    (mem, ChunkCache::new(&kv, CHUNK, groups(), MOST))
}

fn put_row(kv: &MemKv, key: Vec<u8>, value: Vec<u8>) {
    let mut writes = WriteSet::new();
    writes.put(key, value);
    now(kv.commit(writes)).unwrap();
}

fn put_map(kv: &MemKv, key: ChunkKey, extents: &[Extent]) {
    put_row(kv, key.row(Birth::FIRST), map_row(extents));
}

fn get(cache: &ChunkCache, key: ChunkKey) -> Cached {
    now(cache.get(key)).unwrap()
}

/// Makes blocks dirty, those without a place with a reservation.
fn write(cache: &ChunkCache, key: ChunkKey, first: u32, count: u32) -> bool {
    let chunk = get(cache, key);
    let (data, crcs) = blocks_of(&vec![7; count as usize]);
    let new = chunk.borrow().without_space(first..first + count);
    cache.write(key, &chunk, &NewBlocks { first, data: &data, crcs: &crcs, tenant: 0 }, &new)
}

fn drop_dirty(cache: &ChunkCache, key: ChunkKey, blocks: Range<u32>) -> Dropped {
    cache.drop_dirty(key, &get(cache, key), blocks)
}

#[test]
fn a_row_is_loaded_or_refused() {
    let good = map_row(&[extent(0, 2, 5), preallocated(4, 1, 90)]);
    let with = |extents: &[Extent]| map_row(extents);
    let cases = [
        ("a good row", good.clone(), true),
        ("no extent", with(&[]), true),
        ("an extent of no block", with(&[extent(3, 0, 9)]), true),
        ("an extent up to the end of both", with(&[extent(CHUNK - 1, 1, VOLUME_BLOCKS - 1)]), true),
        ("an extent beyond the chunk", with(&[extent(CHUNK - 1, 2, 5)]), false),
        ("an extent that begins beyond the chunk", with(&[extent(CHUNK + 1, 0, 5)]), false),
        ("an extent beyond the volume", with(&[extent(0, 2, VOLUME_BLOCKS - 1)]), false),
        ("extents that overlap", with(&[extent(0, 2, 5), extent(1, 2, 9)]), false),
        ("a row that ends early", good[..good.len() - 1].to_vec(), false),
        ("an empty row", Vec::new(), false),
        ("a row of another format", vec![9; 30], false),
    ];
    for (what, row, is_good) in cases {
        let (kv, cache) = empty();
        let key = chunk_key(2, 3);
        put_row(&kv, key.row(Birth::FIRST), row);
        match now(cache.get(key)) {
            Ok(chunk) => {
                assert!(is_good, "{what}");
                assert!(chunk.borrow().is_clean(), "{what}");
            }
            Err(error) => {
                assert!(!is_good, "{what}: {error}");
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}");
                assert!(cache.peek(key).is_none(), "{what}: nothing is kept");
            }
        }
    }
}

#[test]
fn a_block_is_data_if_it_is_dirty_or_has_a_place_with_data() {
    let (kv, cache) = empty();
    let key = chunk_key(2, 0);
    put_map(&kv, key, &[extent(0, 2, 50), preallocated(2, 2, 52), extent(8, 1, 90)]);
    write(&cache, key, 3, 2);
    let chunk = get(&cache, key);
    let data: Vec<u32> = (0..CHUNK).filter(|block| chunk.borrow().is_data(*block)).collect();
    assert_eq!(data, [0, 1, 3, 4, 8]);
    let without: Vec<u32> = chunk.borrow().without_space(0..CHUNK).into_iter().flatten().collect();
    assert_eq!(without, [5, 6, 7, 9, 10, 11, 12, 13, 14, 15]);
    for (count, expected) in [(0, true), (2, true), (3, false), (CHUNK, false)] {
        assert_eq!(chunk.borrow().covers(count), expected, "{count} blocks");
    }
    let dropped = drop_dirty(&cache, key, 0..CHUNK);
    assert_eq!((dropped.blocks, dropped.reserved), (2, 1), "the preallocated block needed no reservation");
}

#[test]
fn a_new_file_needs_no_look_at_the_rows() {
    let (kv, cache) = empty();
    let (known, other) = (chunk_key(2, 0), chunk_key(3, 0));
    for key in [known, other] {
        put_map(&kv, key, &[extent(0, 1, 5)]);
    }
    cache.file_made(file(2));
    let found = |key: ChunkKey| {
        let in_range = !now(cache.keys_within(key.file, 0..9)).unwrap().is_empty();
        (in_range, now(cache.next_key(key)).unwrap().is_some())
    };
    assert_eq!((found(known), found(other)), ((false, false), (true, true)));
    assert!(get(&cache, known).borrow().map().is_empty());
    // From here on chunks may be missing in memory.
    cache.evict_clean();
    assert_eq!(found(known), (true, true));
    assert!(!get(&cache, known).borrow().map().is_empty());
}

#[test]
fn chunks_are_found_in_memory_and_in_rows() {
    let (kv, cache) = empty();
    for (ino, index) in [(1, 7), (2, 2), (2, 5), (2, u64::MAX), (3, 0)] {
        put_map(&kv, chunk_key(ino, index), &[extent(0, 1, 5)]);
    }
    // A chunk with its row, and two without one.
    for index in [4, 5, 9] {
        write(&cache, chunk_key(2, index), 0, 1);
    }
    let cases: [(Range<u64>, &[u64]); 7] = [
        (0..u64::MAX, &[2, 4, 5, 9, u64::MAX]),
        (0..3, &[2]),
        (2..5, &[2, 4]),
        (3..4, &[]),
        (5..6, &[5]),
        (6..10, &[9]),
        (10..11, &[]),
    ];
    for (indices, expected) in cases {
        let keys = now(cache.keys_within(file(2), indices.clone())).unwrap();
        assert!(keys.iter().all(|key| key.file == file(2)), "{indices:?}");
        let found: Vec<u64> = keys.into_iter().map(|key| key.index).collect();
        assert_eq!(found, expected, "{indices:?}");
    }
    for (from, expected) in [(0, 2), (3, 4), (5, 5), (6, 9), (10, u64::MAX), (u64::MAX, u64::MAX)] {
        let found = now(cache.next_key(chunk_key(2, from))).unwrap();
        assert_eq!(found, Some(chunk_key(2, expected)), "from {from} on");
    }
    assert_eq!(now(cache.next_key(chunk_key(3, 1))).unwrap(), None);
    assert_eq!(now(cache.next_key(chunk_key(4, 0))).unwrap(), None);
}

#[test]
fn a_removed_file_keeps_only_chunks_that_are_not_empty_or_not_committed() {
    let (kv, cache) = empty();
    put_map(&kv, chunk_key(2, 0), &[extent(0, 1, 5)]);
    for index in 0..4 {
        get(&cache, chunk_key(2, index));
    }
    write(&cache, chunk_key(2, 2), 0, 1);
    get(&cache, chunk_key(2, 3)).borrow_mut().change(|map| map.put(extent(0, 1, 9)));
    get(&cache, chunk_key(3, 1));
    cache.file_removed(file(2));
    let left: Vec<u64> = cache.keys_of(file(2), |_| true).iter().map(|key| key.index).collect();
    assert_eq!(left, [0, 2, 3]);
    assert!(cache.peek(chunk_key(3, 1)).is_some(), "it is another file's");
    let changed: Vec<FileId> = cache.changed_files().into_iter().collect();
    assert_eq!(changed, [file(2)]);
}

#[test]
fn a_chunk_is_written_back_in_the_order_of_its_first_write() {
    let (_, cache) = empty();
    let [a, b, c] = [1, 2, 3].map(|index| chunk_key(2, index));
    for key in [b, a, c, b] {
        write(&cache, key, 0, 2);
    }
    assert_eq!(cache.all_dirty(), [b, a, c]);
    drop_dirty(&cache, b, 0..1);
    assert_eq!(cache.oldest_dirty(), Some(b), "one of its blocks is still dirty");
    drop_dirty(&cache, b, 0..CHUNK);
    assert_eq!(cache.all_dirty(), [a, c]);
    write(&cache, b, 5, 1);
    assert_eq!(cache.all_dirty(), [a, c, b], "it was clean meanwhile");
    drop_dirty(&cache, a, 9..CHUNK);
    assert_eq!(cache.all_dirty(), [a, c, b], "nothing of it was dropped");
    assert_eq!(cache.dirty_blocks(), 5);
}

#[test]
fn a_write_says_when_its_chunk_is_full_of_dirty_blocks() {
    let (_, cache) = empty();
    for (first, count, is_full) in
        [(0, 8, false), (0, 8, false), (9, 7, false), (8, 1, true), (3, 1, true), (0, CHUNK, true)]
    {
        assert_eq!(write(&cache, chunk_key(2, 0), first, count), is_full, "{first}+{count}");
    }
    drop_dirty(&cache, chunk_key(2, 0), 3..4);
    assert!(!write(&cache, chunk_key(2, 0), 2, 1));
    assert!(write(&cache, chunk_key(2, 0), 2, 2));
}

/// Random writes and drops over a few chunks, compared with a set of dirty blocks.
#[test]
fn dirty_blocks_and_their_queue_are_as_a_set_of_blocks_has_them() {
    for seed in seeds(0..8) {
        let _printed = Seed(seed);
        let mut random = Random::new(seed);
        let (_, cache) = empty();
        // The dirty blocks of each chunk, and the chunks in the order in which they became dirty.
        let mut plain: BTreeMap<ChunkKey, BTreeSet<u32>> = BTreeMap::new();
        let mut order: Vec<ChunkKey> = Vec::new();
        for _ in 0..400 {
            let key = chunk_key(1 + random.below(2), random.below(3));
            let first = random.below(CHUNK.into()) as u32;
            let count = 1 + random.below((CHUNK - first).into()) as u32;
            let blocks = first..first + count;
            let dirty = plain.entry(key).or_default();
            if random.below(2) == 0 {
                dirty.extend(blocks);
                assert_eq!(write(&cache, key, first, count), dirty.len() as u32 == CHUNK);
                if !order.contains(&key) {
                    order.push(key);
                }
            } else {
                let before = dirty.len();
                dirty.retain(|block| !blocks.contains(block));
                let dropped = drop_dirty(&cache, key, blocks);
                assert_eq!(dropped.blocks as usize, before - dirty.len());
                assert_eq!(dropped.reserved, dropped.blocks, "no block has a place");
                let is_clean = dirty.is_empty();
                order.retain(|other| *other != key || !is_clean);
            }
            assert_eq!(cache.dirty_blocks() as usize, plain.values().map(BTreeSet::len).sum::<usize>());
            assert_eq!(cache.all_dirty(), order);
            assert_eq!(cache.oldest_dirty(), order.first().copied());
        }
    }
}

#[test]
fn only_clean_chunks_that_nobody_uses_are_evicted() {
    let (_, cache) = empty();
    cache.file_made(file(1));
    cache.file_made(file(2));
    write(&cache, chunk_key(1, 0), 0, 1);
    get(&cache, chunk_key(1, 1)).borrow_mut().change(|map| map.put(extent(0, 1, 9)));
    let used = get(&cache, chunk_key(1, 2));
    // A commit has taken the changes of this chunk: it counts as clean, and its row is not there yet.
    let in_commit = get(&cache, chunk_key(1, 3));
    in_commit.borrow_mut().change(|map| map.put(extent(0, 1, 10)));
    let changes = Changes::take(chunk_key(1, 3), &in_commit).unwrap();
    drop(in_commit);
    for index in 0..MOST as u64 - 4 {
        get(&cache, chunk_key(2, index));
    }
    let count = || cache.keys_of(file(1), |_| true).len() + cache.keys_of(file(2), |_| true).len();
    assert_eq!(count(), MOST, "none is evicted before");
    get(&cache, chunk_key(3, 0));
    assert_eq!(count(), 4);
    let left: Vec<u64> = cache.keys_of(file(1), |_| true).iter().map(|key| key.index).collect();
    assert_eq!(left, [0, 1, 2, 3]);
    assert!(Rc::ptr_eq(&used, &get(&cache, chunk_key(1, 2))), "its user and the cache have the same chunk");
    assert!(!cache.complete.contains(&file(1)), "chunks with a row may be missing in memory now");
    changes.put_back();
    assert!(get(&cache, chunk_key(1, 3)).borrow().map().is_changed());
}

#[test]
fn chunks_that_stay_put_off_the_next_eviction() {
    let (_, cache) = empty();
    let used: Vec<Cached> = (0..MOST as u64).map(|index| get(&cache, chunk_key(1, index))).collect();
    for index in 0..(MOST / 8) as u64 {
        get(&cache, chunk_key(2, index));
    }
    assert_eq!(cache.keys_of(file(2), |_| true).len(), MOST / 8, "the first attempt evicted nothing");
    get(&cache, chunk_key(3, 0));
    assert_eq!(cache.keys_of(file(2), |_| true).len(), 0, "the second one comes after an eighth more");
    assert_eq!(cache.keys_of(file(1), |_| true).len(), used.len());
}

fn state(cache: &ChunkCache, ino: u64) -> Rc<FileState> {
    now(cache.file(file(ino))).unwrap()
}

fn put_file(kv: &MemKv, ino: u64, blocks: u64) {
    let row = FileRow { truncations: 3, blocks, owner: OWNER, owner_number: 0 };
    put_row(kv, FileRow::key(file(ino), Birth::FIRST), row.encode());
}

#[test]
fn chunks_of_a_file_share_what_it_holds() {
    let (kv, cache) = empty();
    put_file(&kv, 2, 5);
    put_map(&kv, chunk_key(2, 0), &[extent(0, 3, 5), preallocated(9, 2, 90)]);
    let (known, fresh) = (get(&cache, chunk_key(2, 0)), get(&cache, chunk_key(2, 7)));
    assert!(Rc::ptr_eq(known.borrow().file(), fresh.borrow().file()));
    let file_two = state(&cache, 2);
    assert_eq!((file_two.held(), file_two.truncations()), (5, 3));
    // Blocks with a place need none; the others are reserved.
    write(&cache, chunk_key(2, 0), 2, 4);
    write(&cache, chunk_key(2, 7), 0, 2);
    assert_eq!(file_two.held(), 5 + 3 + 2);
    fresh.borrow_mut().change(|map| map.put(extent(0, 1, 50)));
    drop_dirty(&cache, chunk_key(2, 7), 0..1);
    assert_eq!(file_two.held(), 10, "a reservation became a place");
    known.borrow_mut().change(|map| map.remove(0, CHUNK));
    assert_eq!(file_two.held(), 5);
    drop_dirty(&cache, chunk_key(2, 0), 0..CHUNK);
    drop_dirty(&cache, chunk_key(2, 7), 0..CHUNK);
    assert_eq!((file_two.held(), cache.held(file(2)), cache.held(file(9))), (1, Some(1), None));
}

#[test]
fn files_in_use_stay_and_the_others_come_from_their_rows() {
    let (kv, cache) = empty();
    for ino in 1..4 {
        put_file(&kv, ino, ino);
    }
    let used = state(&cache, 1);
    let of_chunk = get(&cache, chunk_key(2, 0));
    used.count(0, 10);
    of_chunk.borrow().file().count(0, 10);
    state(&cache, 3).count(0, 10);
    cache.drop_files();
    assert_eq!((1..4).map(|ino| state(&cache, ino).held()).collect::<Vec<_>>(), [11, 12, 3]);
    assert!(Rc::ptr_eq(&used, &state(&cache, 1)));
    drop(used);
    cache.file_removed(file(2));
    assert_eq!(cache.held(file(1)), Some(11), "only the file that is removed is dropped");
    cache.file_removed(file(1));
    assert_eq!((cache.held(file(1)), cache.held(file(2))), (None, Some(12)), "a chunk uses file 2");
}

#[test]
fn too_many_files_are_dropped_and_no_file_is_known_to_be_new_any_more() {
    let (kv, cache) = empty();
    put_file(&kv, 5, 7);
    cache.evict_files_at.set(4);
    let used = state(&cache, 1);
    for ino in [6, 7] {
        cache.file_made(file(ino));
        assert_eq!(state(&cache, ino).held(), 0);
    }
    // A new file gets its row while it is in memory.
    let new = state(&cache, 6);
    new.count(0, 4);
    put_file(&kv, 6, 4);
    drop(new);
    assert_eq!(state(&cache, 8).held(), 0);
    assert_eq!(cache.files.borrow().len(), 4);
    assert_eq!(state(&cache, 5).held(), 7);
    assert!(cache.files.borrow().len() <= 2, "file 1 is in use, and file 5 came last");
    assert!(Rc::ptr_eq(&used, &state(&cache, 1)));
    assert_eq!(state(&cache, 6).held(), 4, "its row is looked up");
    assert_eq!(cache.held(file(7)), None);
}

/// Blocks of a file for a caller who read its row before another one changed it to 6 blocks, with `then`
/// between that change and the arrival of the row.
fn held_by_a_late_reader(then: impl FnOnce(&ChunkCache)) -> Option<u64> {
    let mem = MemKv::new(1 << 24);
    let kv = Rc::new(Slow { inner: mem.clone(), is_slow: Cell::default() });
    let shared: Rc<dyn Kv> = kv.clone();
    let cache = ChunkCache::new(&shared, CHUNK, groups(), MOST);
    kv.is_slow.set(true);
    let mut late = pin!(cache.file(file(2)));
    assert!((&mut late).now_or_never().is_none());
    kv.is_slow.set(false);
    state(&cache, 2).count(0, 6);
    put_file(&mem, 2, 6);
    then(&cache);
    late.now_or_never().map(|state| state.unwrap().held())
}

#[test]
fn a_row_that_was_read_before_the_file_changed_does_not_count() {
    assert_eq!(held_by_a_late_reader(ChunkCache::drop_files), Some(6), "it reads again");
}

/// Regression: a reader that made room for the row of a file dropped the newer state of the same file.
#[test]
fn making_room_for_a_file_does_not_drop_what_another_task_knows_of_it() {
    assert_eq!(held_by_a_late_reader(|cache| cache.drop_files_from(1)), Some(6), "no other read");
}

#[test]
fn a_damaged_row_of_a_file_is_an_error_and_loads_nothing() {
    let (kv, cache) = empty();
    for value in [vec![], vec![1, 2], vec![9; 37]] {
        put_row(&kv, FileRow::key(file(2), Birth::FIRST), value.clone());
        let error = now(cache.file(file(2))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{value:?}");
        assert!(now(cache.get(chunk_key(2, 0))).is_err() && cache.peek(chunk_key(2, 0)).is_none());
    }
    put_file(&kv, 2, 1);
    assert_eq!(state(&cache, 2).held(), 1);
}

#[test]
fn a_file_that_stays_is_as_its_row_and_a_removed_one_is_nothing() {
    let (kv, cache) = empty();
    put_file(&kv, 2, 3);
    put_map(&kv, chunk_key(2, 0), &[extent(0, 3, 5)]);
    let chunk = get(&cache, chunk_key(2, 0));
    for is_removed in [false, true] {
        state(&cache, 2).truncate(crate::REMOVED);
        assert!(state(&cache, 2).check(u64::MAX - 1).is_err());
        if is_removed {
            chunk.borrow_mut().change(|map| map.remove(0, CHUNK));
            chunk.borrow_mut().change(ChunkMap::take_changes);
            state(&cache, 2).committed(None);
            put_row(&kv, FileRow::key(file(2), Birth::FIRST), Vec::new());
        }
        cache.file_removed(file(2));
        let left = chunk.borrow().file().truncations();
        assert_eq!(left, if is_removed { 0 } else { 3 }, "the row counts");
    }
}

/// A store whose reads find a row as it is, and return it only when they may.
struct Slow {
    inner: Rc<MemKv>,
    is_slow: Cell<bool>,
}

impl Slow {
    async fn wait(&self) {
        std::future::poll_fn(|_| if self.is_slow.get() { Poll::Pending } else { Poll::Ready(()) }).await;
    }
}

impl KvRead for Slow {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        let row = now(self.inner.get(key));
        Box::pin(async move {
            self.wait().await;
            row
        })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        let rows = now(self.inner.get_many(keys));
        Box::pin(async move {
            self.wait().await;
            rows
        })
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        self.inner.scan(from, until, limit)
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        self.inner.keys(from, until, limit)
    }
}

impl Kv for Slow {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        self.inner.snapshot()
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.inner.commit(writes)
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.inner.commit_durable(writes)
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.inner.flush()
    }

    fn usage(&self) -> Usage {
        Kv::usage(&*self.inner)
    }
}
