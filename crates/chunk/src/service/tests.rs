#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]

use super::*;
use crate::tests::{
    Bench, CHUNK, CLIENT, GENERATION, OWNER, blocks_of, extent, file, known, on_a_volume, write,
};
use penstock_base::{BLOCK_BYTES, Birth, Share, TargetId};
use penstock_wire::data::{
    SeekRef, decode_found, decode_reply, encode_commit, encode_read, encode_seek, encode_space, encode_write,
};
use std::cell::{Cell, RefCell};

/// The rest of a node, which lets contents change or not.
#[derive(Default)]
struct Uses {
    refuses: Cell<bool>,
    open: Rc<Cell<u32>>,
    begun: Cell<u32>,
    damaged: RefCell<Vec<(Ino, u64)>>,
}

struct Use(Rc<Cell<u32>>);

impl FileUse for Use {
    fn owner(&self) -> Owner {
        OWNER
    }

    fn as_of(&self) -> AsOf {
        AsOf::default()
    }

    fn share(&self) -> Share {
        Share::ALL
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl FileUses for Uses {
    fn change_contents(
        &self,
        _: TargetId,
        _: Ino,
    ) -> LocalBoxFuture<'_, Result<Box<dyn FileUse + '_>, Failure>> {
        Box::pin(async {
            if self.refuses.get() {
                return Err(Failure::new(ErrorKind::Denied, "a check runs"));
            }
            self.begun.set(self.begun.get() + 1);
            self.open.set(self.open.get() + 1);
            Ok(Box::new(Use(self.open.clone())) as Box<dyn FileUse>)
        })
    }

    fn make_space(&self, _: TargetId) -> LocalBoxFuture<'_, bool> {
        Box::pin(async { false })
    }

    fn damaged(&self, ino: Ino, chunk: u64, _: &str) {
        self.damaged.borrow_mut().push((ino, chunk));
    }
}

const CHUNK_REF: ChunkRef = ChunkRef { ino: Ino(2), chunk: 1, block: 3, count: 2, truncations: 0 };
const SPACE: SpaceRef = SpaceRef {
    ino: Ino(2),
    change: SpaceChange::Reserve,
    from: 20,
    until: 24,
    truncations: 0,
    share: Share::ALL,
};
const SEEK: SeekRef = SeekRef { ino: Ino(2), hole: false, from: 0, until: 100, share: Share::ALL };
const REPLIER: Replier = Replier { target: TargetId(0), generation: GENERATION };

async fn service(bench: &Bench) -> (Rc<Target>, Service) {
    let target = bench.target().await;
    (target.clone(), Service::new(&target))
}

/// Serves a request of a kind that the service knows.
async fn serve(service: &Service, uses: &Uses, kind: Kind, body: Vec<u8>, payload: Vec<Buf>) -> Outcome {
    service
        .serve(&Frame::request(kind, body, payload), CLIENT, uses)
        .await
        .expect("a kind of the data service")
}

#[test]
fn a_file_is_written_read_searched_and_emptied() {
    on_a_volume(async |bench| {
        let (_, service) = service(bench).await;
        let uses = Uses::default();
        let serve = async |kind, body, payload| serve(&service, &uses, kind, body, payload).await.unwrap();
        let (data, crcs) = blocks_of(&[4, 5]);
        // The payload may come in several buffers.
        let parts = vec![data.slice(0..BLOCK_BYTES), data.slice(BLOCK_BYTES..2 * BLOCK_BYTES)];
        let (body, _) = serve(Kind::Write, encode_write(&CHUNK_REF, &crcs), parts).await;
        assert_eq!(decode_reply(&body), Ok((REPLIER, vec![])));
        let (body, payload) = serve(Kind::Read, encode_read(&CHUNK_REF), vec![]).await;
        assert_eq!(decode_reply(&body), Ok((REPLIER, crcs)));
        assert_eq!(penstock_base::buf::gather(&payload)[..], data[..]);
        for (hole, from, expected) in [(false, 0, 19), (true, 19, 21), (false, 21, 100), (true, 0, 0)] {
            let (body, _) = serve(Kind::Seek, encode_seek(&SeekRef { hole, from, ..SEEK }), vec![]).await;
            assert_eq!(decode_found(&body), Ok(expected), "from {from}, a hole: {hole}");
        }
        let (body, _) = serve(Kind::Commit, encode_commit(Ino(2), false), vec![]).await;
        assert_eq!(decode_reply(&body), Ok((REPLIER, vec![])));
        assert_eq!(
            bench.kv.rows().len(),
            5,
            "of the map, an allocation group and its counts, the file and its owner"
        );
        for (change, expected) in
            [(SpaceChange::Reserve, [4, 5]), (SpaceChange::Zero, [0, 0]), (SpaceChange::Punch, [0, 0])]
        {
            let space = SpaceRef { change, from: 16, until: 24, ..SPACE };
            serve(Kind::Space, encode_space(&space), vec![]).await;
            let (_, payload) = serve(Kind::Read, encode_read(&CHUNK_REF), vec![]).await;
            let bytes = penstock_base::buf::gather(&payload);
            assert_eq!([bytes[0], bytes[BLOCK_BYTES]], expected, "{change:?}");
        }
        assert_eq!(
            (uses.begun.get(), uses.open.get()),
            (4, 0),
            "a write and three changes, all of them over"
        );
    });
}

#[test]
fn a_bad_request_is_refused_and_changes_nothing() {
    on_a_volume(async |bench| {
        let (target, service) = service(bench).await;
        let uses = Uses::default();
        let (data, crcs) = blocks_of(&[4, 5]);
        let at = |block, count| ChunkRef { block, count, ..CHUNK_REF };
        let written = |chunk: &ChunkRef, crcs: &[u32]| encode_write(chunk, crcs);
        let far = penstock_base::MAX_FILE_BYTES / BLOCK_BYTES as u64;
        let short = encode_read(&CHUNK_REF);
        let with_one_at = |at: usize| {
            let mut body = short.clone();
            body[at] = 1;
            body
        };
        let cases: Vec<(&str, Kind, Vec<u8>, Vec<Buf>)> = vec![
            ("no body", Kind::Read, vec![], vec![]),
            ("a body that ends early", Kind::Read, short[..short.len() - 1].to_vec(), vec![]),
            ("a read of no block", Kind::Read, encode_read(&at(0, 0)), vec![]),
            ("a read beyond the chunk", Kind::Read, encode_read(&at(CHUNK - 1, 2)), vec![]),
            ("a read with a long count", Kind::Read, encode_read(&at(1, u32::MAX)), vec![]),
            ("a read of the last block", Kind::Read, encode_read(&at(u32::MAX, 1)), vec![]),
            ("a grant", Kind::Read, with_one_at(8), vec![]),
            ("a proof of a grant", Kind::Read, with_one_at(31), vec![]),
            ("a project", Kind::Read, with_one_at(32), vec![]),
            (
                "a chunk behind the longest file",
                Kind::Read,
                encode_read(&ChunkRef { chunk: far / u64::from(CHUNK), ..CHUNK_REF }),
                vec![],
            ),
            ("no checksums", Kind::Write, written(&CHUNK_REF, &[]), vec![data.clone()]),
            ("too little data", Kind::Write, written(&CHUNK_REF, &crcs), vec![data.slice(0..BLOCK_BYTES)]),
            ("no data", Kind::Write, written(&CHUNK_REF, &crcs), vec![]),
            ("too much data", Kind::Write, written(&CHUNK_REF, &crcs), vec![data.clone(), data.clone()]),
            ("a part of a block", Kind::Write, written(&CHUNK_REF, &crcs), vec![data.slice(0..5000)]),
            ("a write beyond the chunk", Kind::Write, written(&at(CHUNK - 1, 2), &crcs), vec![data.clone()]),
            ("a write of no block", Kind::Write, written(&at(0, 0), &[]), vec![]),
            ("no commit", Kind::Commit, vec![1, 2, 3], vec![]),
            ("a search backwards", Kind::Seek, encode_seek(&SeekRef { from: 9, until: 8, ..SEEK }), vec![]),
            ("a search too far", Kind::Seek, encode_seek(&SeekRef { until: far + 1, ..SEEK }), vec![]),
            ("space backwards", Kind::Space, encode_space(&SpaceRef { from: 25, ..SPACE }), vec![]),
            ("space too far", Kind::Space, encode_space(&SpaceRef { until: far + 1, ..SPACE }), vec![]),
        ];
        let free = target.usage().free_blocks;
        for (what, kind, body, payload) in cases {
            let failure = serve(&service, &uses, kind, body, payload).await.expect_err(what);
            assert_eq!(failure.kind, ErrorKind::Invalid, "{what}: {failure}");
            assert_eq!(uses.open.get(), 0, "{what}: its use of the file is over");
        }
        assert_eq!(target.usage().free_blocks, free);
        assert_eq!(target.cache.dirty_blocks(), 0);
        assert!(uses.damaged.borrow().is_empty());
    });
}

#[test]
fn the_last_block_of_the_longest_file_can_be_written() {
    on_a_volume(async |bench| {
        let (_, service) = service(bench).await;
        let last = penstock_base::MAX_FILE_BYTES / BLOCK_BYTES as u64 / u64::from(CHUNK) - 1;
        let (data, crcs) = blocks_of(&[4]);
        for (chunk, expected) in [(last, true), (last + 1, false)] {
            let chunk = ChunkRef { chunk, block: CHUNK - 1, count: 1, ..CHUNK_REF };
            let body = encode_write(&chunk, &crcs);
            let written = serve(&service, &Uses::default(), Kind::Write, body, vec![data.clone()]).await;
            assert_eq!(written.is_ok(), expected, "chunk {}", chunk.chunk);
        }
    });
}

#[test]
fn contents_change_only_while_the_node_lets_them() {
    on_a_volume(async |bench| {
        let (target, service) = service(bench).await;
        write(&target, crate::tests::chunk_key(2, 1), 0, &[1; 5]).await;
        let uses = Uses::default();
        uses.refuses.set(true);
        let (data, crcs) = blocks_of(&[4, 5]);
        for (kind, body, payload, expected) in [
            (Kind::Write, encode_write(&CHUNK_REF, &crcs), vec![data], Some(ErrorKind::Denied)),
            (Kind::Space, encode_space(&SPACE), vec![], Some(ErrorKind::Denied)),
            (Kind::Read, encode_read(&CHUNK_REF), vec![], None),
            (Kind::Seek, encode_seek(&SEEK), vec![], None),
            (Kind::Commit, encode_commit(Ino(2), true), vec![], None),
        ] {
            let found = serve(&service, &uses, kind, body, payload).await.err().map(|failure| failure.kind);
            assert_eq!(found, expected, "{kind:?}");
        }
    });
}

#[test]
fn an_error_of_the_target_keeps_its_kind() {
    on_a_volume(async |bench| {
        bench.put_row(crate::tests::chunk_key(3, 0).row(Birth::FIRST), vec![0; 4]).await;
        let (target, service) = service(bench).await;
        let uses = Uses::default();
        let truncated =
            target.truncate(file(2), 0..u64::MAX, crate::Behind::Dropped, known(5), Default::default());
        truncated.await.unwrap();
        let (data, crcs) = blocks_of(&[4, 5]);
        let of_a_bad_row = ChunkRef { ino: Ino(3), chunk: 0, ..CHUNK_REF };
        let everything = SpaceRef { from: 0, until: bench.volume.blocks(), truncations: 5, ..SPACE };
        for (kind, body, payload, expected) in [
            (Kind::Write, encode_write(&CHUNK_REF, &crcs), vec![data.clone()], ErrorKind::RefreshMap),
            (Kind::Space, encode_space(&SPACE), vec![], ErrorKind::RefreshMap),
            (Kind::Space, encode_space(&everything), vec![], ErrorKind::NoSpace),
            (Kind::Read, encode_read(&of_a_bad_row), vec![], ErrorKind::Corrupt),
            (Kind::Write, encode_write(&of_a_bad_row, &crcs), vec![data], ErrorKind::Corrupt),
            (Kind::Seek, encode_seek(&SeekRef { ino: Ino(3), ..SEEK }), vec![], ErrorKind::Corrupt),
        ] {
            let failure = serve(&service, &uses, kind, body, payload).await.unwrap_err();
            assert_eq!(failure.kind, expected, "{kind:?}: {failure}");
        }
        assert_eq!(*uses.damaged.borrow(), [(Ino(3), 0)], "only a read reports damaged data");
    });
}

#[test]
fn a_read_of_lost_data_is_reported() {
    on_a_volume(async |bench| {
        bench.put_map(crate::tests::chunk_key(2, 1), &[extent(0, 8, 0)]).await;
        bench.put_marks(&[0..8]).await;
        bench.write_stripe(0, 0x5a).await;
        let (_, service) = service(bench).await;
        let uses = Uses::default();
        bench.corrupt(0x5a);
        let failure = serve(&service, &uses, Kind::Read, encode_read(&CHUNK_REF), vec![]).await.unwrap_err();
        assert_eq!(failure.kind, ErrorKind::Corrupt, "{failure}");
        assert_eq!(*uses.damaged.borrow(), [(Ino(2), 1)]);
    });
}

#[test]
fn requests_of_other_services_are_left_to_them() {
    on_a_volume(async |bench| {
        let (_, service) = service(bench).await;
        for kind in [Kind::Hello, Kind::Ping, Kind::Rename, Kind::Watch, Kind::Sync] {
            let request = Frame::request(kind, encode_read(&CHUNK_REF), vec![]);
            assert!(service.serve(&request, CLIENT, &Uses::default()).await.is_none(), "{kind:?}");
        }
    });
}

#[test]
fn what_is_written_counts_to_the_owner_that_the_node_names() {
    on_a_volume(async |bench| {
        let (target, service) = service(bench).await;
        let uses = Uses::default();
        let (data, crcs) = blocks_of(&[4, 5]);
        serve(&service, &uses, Kind::Write, encode_write(&CHUNK_REF, &crcs), vec![data]).await.unwrap();
        let space = SpaceRef { ino: Ino(3), ..SPACE };
        serve(&service, &uses, Kind::Space, encode_space(&space), vec![]).await.unwrap();
        target.commit_all().await.unwrap();
        let counted: Vec<_> = target.accounts().into_iter().collect();
        assert_eq!(counted, [((Branch::MAIN, OWNER), 2 + 4)]);
        assert_eq!(target.held_blocks(&[file(2), file(3)]).await.unwrap(), [2, 4]);
    });
}
