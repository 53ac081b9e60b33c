//! Decoders of text: the files of a store's folder, and values that people type.

use crate::check::{Decoder, Form, Verdict, agrees, unsealed};
use penstock_array::ownership::{AcceptedLoss, Claim, Generations, Since};
use penstock_array::{MemberNo, MemberSet};
use penstock_base::text::{parse_code, parse_size};
use penstock_base::{ArrayId, Epoch, Id128};
use penstock_node::{Claims, StoreFile};
use std::collections::BTreeMap;
use std::str::from_utf8;

/// `coordination-json`: the claims of a node.
pub(super) const CLAIMS: Decoder = Decoder {
    name: "coordination-json",
    most_bytes: 2048,
    seeds: || {
        let members = |mask: u64| -> MemberSet {
            (0..64).filter(|at| mask & 1 << at != 0).map(MemberNo::new).collect()
        };
        let claim = |number: u8, stale: u64| {
            let since = |first, until| Since { first: Epoch(first), until: Epoch(until) };
            let accepted = AcceptedLoss::new([(3, since(2, 0)), (63, since(1, 2))], members(stale + 1))
                .expect("members that there are");
            let generations =
                Generations::new([(2, 2), (63, u64::MAX / 2)]).expect("drives that replaced others");
            let claim = Claim {
                epoch: Epoch(3),
                revision: u64::MAX / 2,
                stale: members(stale),
                accepted,
                generations,
                root_epoch: Epoch(2),
            };
            (ArrayId(Id128([number; 16])), claim)
        };
        [Claims::default(), Claims([claim(1, 0), claim(0xab, 5)].into())]
            .map(|claims| claims.encode().expect("claims are plain numbers"))
            .to_vec()
    },
    seal: unsealed,
    check: |bytes| {
        agrees(bytes, &Form::Value, Claims::decode, |claims| {
            claims.encode().expect("claims are plain numbers")
        })
    },
};

/// `store-json`: an accepted file gives its store and its drives, or an error.
pub(super) const STORE_FILE: Decoder = Decoder {
    name: "store-json",
    most_bytes: 2048,
    seeds: || {
        let id = |number: u8| Id128([number; 16]).to_string();
        let file = StoreFile {
            format: 1,
            store: id(1),
            code: "4+2".into(),
            drive_bytes: 4 << 30,
            drives: BTreeMap::from([(id(2), "drive \"a\"".into()), (id(3), "/dev/b".into())]),
        };
        vec![file.encode().expect("the file is plain text")]
    },
    seal: unsealed,
    check: |bytes| {
        let encode = |file: &StoreFile| file.encode().expect("the file is plain text");
        let verdict = agrees(bytes, &Form::Value, StoreFile::decode, encode)?;
        if let Ok(file) = StoreFile::decode(bytes) {
            let _ = (file.store_id(), file.paths());
        }
        Ok(verdict)
    },
};

fn text_of(bytes: &[u8]) -> Result<&str, String> {
    from_utf8(bytes).map_err(|error| error.to_string())
}

/// Checks that an accepted text begins with a digit and has only characters that `known` accepts.
fn plain(bytes: &[u8], verdict: Verdict, known: impl Fn(u8) -> bool) -> Result<Verdict, String> {
    let sound = bytes.first().is_some_and(u8::is_ascii_digit) && bytes.iter().all(|byte| known(*byte));
    match verdict == Verdict::Refused || sound {
        true => Ok(verdict),
        false => Err("an odd text is accepted".into()),
    }
}

/// `size`: a size in bytes such as `4G`.
pub(super) const SIZE: Decoder = Decoder {
    name: "size",
    most_bytes: 64,
    seeds: || ["0", "5", "4K", "512M", "4GB", "1TiB"].map(|text| text.into()).to_vec(),
    seal: unsealed,
    check: |bytes| {
        let decode = |bytes: &[u8]| parse_size(text_of(bytes)?);
        let verdict = agrees(bytes, &Form::Value, decode, |size| size.to_string().into_bytes())?;
        plain(bytes, verdict, |byte| byte.is_ascii_alphanumeric())
    },
};

/// `code`: a code such as `4+2`.
pub(super) const CODE: Decoder = Decoder {
    name: "code",
    most_bytes: 64,
    seeds: || ["4+2", "1+0", "60+4"].map(|text| text.into()).to_vec(),
    seal: unsealed,
    check: |bytes| {
        let decode = |bytes: &[u8]| parse_code(text_of(bytes)?);
        let verdict = agrees(bytes, &Form::Value, decode, |(k, m)| format!("{k}+{m}").into_bytes())?;
        plain(bytes, verdict, |byte| byte.is_ascii_digit() || byte == b'+')
    },
};

/// `id`: 32 hexadecimal digits, of either case.
pub(super) const ID: Decoder = Decoder {
    name: "id",
    most_bytes: 64,
    seeds: || vec![Id128([0xa7; 16]).to_string().into(), Id128::NIL.to_string().into()],
    seal: unsealed,
    check: |bytes| {
        let lower = bytes.to_ascii_lowercase();
        let decode = |bytes: &[u8]| text_of(bytes)?.parse::<Id128>().map_err(|error| error.to_string());
        let verdict = agrees(&lower, &crate::check::SAME, decode, |id| id.to_string().into_bytes())?;
        // Both cases give the same id.
        match decode(bytes).is_ok() == (verdict == Verdict::Accepted) {
            true => Ok(verdict),
            false => Err("upper and lower case differ".into()),
        }
    },
};
