use super::*;
use crate::geometry::{CreateSpec, Geometry};
use crate::test_env;
use futures_util::FutureExt;
use penstock_base::{ArrayId, Id128, Version};

fn queue() -> Rc<EntryQueue> {
    let spec = CreateSpec::new("t", 4, 2).unwrap();
    let (geometry, layout) = (Geometry::fit(&spec, 1 << 30).unwrap(), Rc::new(spec.layout));
    EntryQueue::new(&Context::new(&test_env::env(), ArrayId(Id128::NIL), "t", geometry, layout))
}

fn data(stripe: u64, blocks: usize) -> (Vec<Entry>, Vec<Buf>) {
    let entry = Entry::Data { stripe: Stripe(stripe), order: stripe, block: 0, crcs: vec![0; blocks] };
    (vec![entry], vec![Buf::zeroed(blocks * BLOCK_BYTES)])
}

fn push(queue: &EntryQueue, stripe: u64, blocks: usize) {
    let (entries, payload) = data(stripe, blocks);
    queue.push_data(entries, payload, vec![]);
}

const CONTROL: Entry = Entry::Versions { reserved: Version(1) };

#[test]
fn control_entries_overtake_data() {
    let queue = queue();
    push(&queue, 1, 2);
    let _receiver = queue.push_control(CONTROL, vec![]);
    let items = queue.take(511);
    assert_eq!(items.len(), 2);
    assert!(items[0].reply.is_some() && items[1].reply.is_none());
    assert_eq!(queue.queued_data(), (0, 0));
}

#[test]
fn a_record_holds_what_fits_in_the_segment_and_in_a_record() {
    for (left, blocks, expected) in [
        // All fits.
        (511, &[10, 10][..], 2),
        // The second one waits for the next segment.
        (15, &[10, 10], 1),
        // The first one does not fit, so both are for a new segment.
        (5, &[10, 10], 2),
        // A record has at most 254 blocks of payload.
        (511, &[200, 60], 1),
    ] {
        let queue = queue();
        blocks.iter().enumerate().for_each(|(at, blocks)| push(&queue, at as u64, *blocks));
        assert_eq!(queue.take(left).len(), expected, "{left} blocks left, items of {blocks:?}");
        let rest: usize = blocks.iter().skip(expected).sum();
        assert_eq!(queue.queued_data(), (rest as u64, (blocks.len() - expected) as u64));
    }
}

#[test]
fn a_waiter_is_woken_when_all_before_it_is_durable() {
    let queue = queue();
    push(&queue, 1, 1);
    let mut first = Box::pin(queue.flush());
    assert!(first.as_mut().now_or_never().is_none());
    push(&queue, 2, 1);
    let mut second = Box::pin(queue.flush());
    assert!(second.as_mut().now_or_never().is_none());
    assert!(!queue.wants_flush(), "nothing is appended yet");
    assert_eq!(queue.mark_appended(Count { data: 1, control: 0 }), (1, 2));
    assert!(queue.wants_flush());
    assert_eq!(queue.mark_durable(), 1);
    assert!(matches!(first.now_or_never(), Some(Ok(()))));
    assert!(second.as_mut().now_or_never().is_none());
    queue.shut();
    assert!(matches!(second.now_or_never(), Some(Err(ArrayError::Closed))));
    assert!(matches!(queue.flush().now_or_never(), Some(Err(ArrayError::Closed))));
}

#[test]
fn purged_entries_keep_their_place() {
    let queue = queue();
    push(&queue, 1, 3);
    push(&queue, 2, 4);
    queue.purge_data(Stripe(1)..Stripe(2));
    assert_eq!(queue.queued_data(), (4, 2));
    let items = queue.take(511);
    let lengths: Vec<usize> = items.iter().map(Item::blocks).collect();
    assert_eq!(lengths, [0, 4]);
}

#[test]
#[should_panic(expected = "appended")]
fn more_is_never_appended_than_was_queued() {
    queue().mark_appended(Count { data: 1, control: 0 });
}
