//! Tests of requests with numbers at their limits: each is answered, and other clients are served afterwards.
//!
//! No request may cause a panic or an endless loop.
//!
//! `PENSTOCK_SEEDS=A..B` runs other seeds than the default few.

use crate::machine::Machine;
use crate::remote::{Way, make, on_machine, read};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Buf, Class, ErrorKind, Ino, Share, crc32c_blocks};
use penstock_client::Client;
use penstock_fabric::Remote;
use penstock_sim::World;
use penstock_wire::data::{
    ChunkRef, SeekRef, SpaceChange, SpaceRef, encode_commit, encode_read, encode_seek, encode_space,
    encode_write,
};
use penstock_wire::metadata::InodeRequest;
use penstock_wire::{Frame, Header, Kind, Object};
use prost::Message;
use std::time::Duration;

/// Number of requests of one seed.
const REQUESTS: u64 = 400;

/// Draws the parts of requests.
struct Draw<'a> {
    world: &'a World,
    inos: Vec<u64>,
}

impl Draw<'_> {
    fn below(&self, bound: u64) -> u64 {
        self.world.below(bound)
    }

    fn number(&self) -> u64 {
        const LIMITS: [u64; 14] = [
            0,
            1,
            2,
            255,
            4096,
            (1 << 31) - 1,
            1 << 31,
            (1 << 32) - 1,
            1 << 32,
            1 << 50,
            1 << 62,
            (1 << 63) - 1,
            1 << 63,
            u64::MAX,
        ];
        match self.below(4) {
            0 => self.inos[self.below(self.inos.len() as u64) as usize],
            1 => self.below(100),
            _ => LIMITS[self.below(LIMITS.len() as u64) as usize],
        }
    }

    fn ino(&self) -> Ino {
        Ino(if self.below(5) == 0 {
            self.number()
        } else {
            self.inos[self.below(self.inos.len() as u64) as usize]
        })
    }

    fn bytes(&self) -> Vec<u8> {
        let len = [0, 1, 8, 255, 256, 5000, 65_536, 70_000][self.below(8) as usize];
        (0..len).map(|at| (b'a' + (at % 23) as u8) ^ if self.below(500) == 0 { 0xff } else { 0 }).collect()
    }

    /// A protobuf message with random fields: each field number that some request has, with a random type.
    fn message(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for field in 1..=14u64 {
            match self.below(5) {
                0 | 1 => {
                    varint(&mut bytes, field << 3);
                    varint(&mut bytes, self.number());
                }
                2 => {
                    let value = if self.below(2) == 0 {
                        format!("name-{}", self.below(4)).into()
                    } else {
                        self.bytes()
                    };
                    varint(&mut bytes, field << 3 | 2);
                    varint(&mut bytes, value.len() as u64);
                    bytes.extend(value);
                }
                _ => {}
            }
        }
        bytes
    }

    fn chunk(&self) -> ChunkRef {
        ChunkRef {
            ino: self.ino(),
            chunk: self.number(),
            block: self.number() as u32,
            count: if self.below(2) == 0 { self.below(4) as u32 } else { self.number() as u32 },
            truncations: self.number(),
        }
    }

    fn frame(&self, kind: Kind) -> Frame {
        let change = [SpaceChange::Reserve, SpaceChange::Zero, SpaceChange::Punch][self.below(3) as usize];
        let (from, until, truncations) = (self.number(), self.number(), self.number());
        let share = Share::new(self.below(3) as u16, self.below(4) as u16, self.below(3) as u16);
        let share = share.unwrap_or(Share::ALL);
        let body = match kind {
            Kind::Read => encode_read(&self.chunk()),
            Kind::Write => {
                // The transport has verified the payload before.
                let data = Buf::zeroed(self.below(5) as usize * BLOCK_BYTES);
                let crcs = crc32c_blocks(&data);
                let chunk = ChunkRef { count: crcs.len() as u32, ..self.chunk() };
                return Frame::request(kind, encode_write(&chunk, &crcs), vec![data]);
            }
            Kind::Commit => encode_commit(self.ino(), self.below(2) == 0),
            Kind::Seek => {
                encode_seek(&SeekRef { ino: self.ino(), hole: self.below(2) == 0, from, until, share })
            }
            Kind::Space => {
                encode_space(&SpaceRef { ino: self.ino(), change, from, until, truncations, share })
            }
            _ => self.message(),
        };
        Frame::request(kind, body, Vec::new())
    }
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// True if an ordinary client is served.
async fn is_served(machine: &Machine, number: u64) {
    let client = &machine.client;
    let name = format!("ordinary-{number}");
    let ino = make(client, &name).await.unwrap();
    client.write(ino, 0, name.as_bytes()).await.unwrap();
    client.fsync(ino).await.unwrap();
    assert_eq!(read(client, ino).await, name.as_bytes());
    client.release(ino).await.unwrap();
    client.unlink(client.root(), name.as_bytes(), false).await.unwrap();
}

/// There is one target, and one fileset with one branch, each in its first epoch.
#[test]
fn requests_for_what_does_not_exist_are_refused_by_name() {
    on_machine(7_000_000, async |_, machine| {
        let session = machine.client.session();
        let root = InodeRequest { ino: machine.client.root().ino.0 }.encode_to_vec();
        let asked = async |change: fn(&mut Header)| {
            let mut frame = Frame::request(Kind::GetAttr, root.clone(), Vec::new());
            frame.header.session = session;
            change(&mut frame.header);
            machine.node.serve(frame, true).await.into_result().map(drop)
        };
        assert_eq!(asked(|_| {}).await, Ok(()));
        type Case = (fn(&mut Header), &'static str);
        let cases: [Case; 7] = [
            (|header| header.object = Object::Fileset(7), "there is no fileset 7"),
            (|header| header.object = Object::FIRST_TARGET, "there is no target 0"),
            (|header| header.epoch = 3, "fileset 0 has no epoch 3"),
            (|header| header.branch = 4, "fileset 0 has no branch 4"),
            (|header| header.tenant = 6, "there is no tenant 6"),
            (|header| header.class = Class::Log, "requests of class Log are those of nodes"),
            (|header| header.user = 5, "the session asks for no user"),
        ];
        for (change, wanted) in cases {
            let failure = asked(change).await.unwrap_err();
            assert_eq!(failure.kind, ErrorKind::Invalid, "{failure}");
            assert_eq!(failure.message, format!("GetAttr: {wanted}"));
        }
    });
}

#[test]
fn requests_with_any_numbers_stop_nobody() {
    for seed in penstock_sim::seeds(1..9) {
        on_machine(7_000_000 + seed, async |_, machine| {
            let way = Way::new(&machine);
            let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
            let other = Client::connect(&machine.env, remote.clone(), "any numbers").await.unwrap();
            let mut inos = vec![machine.client.root().ino.0];
            for name in ["name-0", "name-1", "name-2"] {
                inos.push(make(&other, name).await.unwrap().ino.0);
            }
            let draw = Draw { world: &machine.world, inos };
            // Hello starts sessions that nobody ends, and End and Closing end this one.
            let kinds: Vec<Kind> = (0..0x40)
                .filter_map(Kind::from_u16)
                .filter(|kind| !matches!(kind, Kind::Hello | Kind::End | Kind::Closing | Kind::Lease))
                .collect();
            for number in 0..REQUESTS {
                let kind = kinds[draw.below(kinds.len() as u64) as usize];
                let mut frame = draw.frame(kind);
                frame.header.session = if draw.below(20) == 0 { draw.number() } else { other.session() };
                frame.header.sequence = 0;
                match draw.below(32) {
                    0 => frame.header.branch = draw.number(),
                    1 => frame.header.epoch = draw.number(),
                    2 => frame.header.user = draw.number() as u32,
                    _ => {}
                }
                let served = machine.node.serve(frame, true);
                // A request may wait for other clients for as long as their sessions last.
                let _ = timeout(&machine.env, Duration::from_secs(120), served).await;
                if number % 100 == 99 {
                    timeout(&machine.env, Duration::from_secs(600), is_served(&machine, number))
                        .await
                        .unwrap_or_else(|| panic!("seed {seed}: nobody is served after a {kind:?}"));
                }
            }
            remote.close();
            machine.node.abandon();
        });
    }
}
