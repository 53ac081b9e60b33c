//! Failure domains that are away one after the other: the log must be in more than one of them again before
//! the next one goes. Each test is the regression of an array that could not be opened any more.

use crate::bench::{Site, spec, tags, write_fresh};
use crate::outdated::life;
use penstock_array::{ArrayError, CreateSpec, Layout};
use penstock_layout::Shape;
use std::time::Duration;

fn site((k, m): (usize, usize), members: usize, spares: usize, domains: usize) -> Site {
    let shape = Shape { members, strips: k + m, redundancy: m, spares, domains };
    let site = Site::new(CreateSpec { layout: Layout::spread(shape, 1).unwrap(), ..spec(k, m) });
    life(&site, 1, &[], async |machine| {
        for stripe in 0..20 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.volume.flush().await?;
        machine.array.close().await
    })
    .unwrap();
    site
}

/// A life without these members, of some minutes.
fn without(site: &Site, lost: &[usize]) -> Result<(), ArrayError> {
    life(site, 2, lost, async |machine| {
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(300)).await;
        assert_eq!(machine.array.missing_carriers(), 0);
        let block = machine.volume.stripe_blocks();
        assert_eq!(tags(&machine.volume, 3 * block, 1).await?, [4000]);
        machine.array.close().await
    })
}

fn of_domain(members: usize, domains: usize, domain: usize) -> Vec<usize> {
    (0..members).filter(|at| at % domains == domain).collect()
}

#[test]
fn one_of_two_domains_is_lost_after_the_other_was_away() {
    for (code, members, away) in [
        ((1, 1), 8, of_domain(8, 2, 1)),
        ((2, 2), 12, of_domain(12, 2, 1)),
        // One drive alone: its place as a carrier goes to the other domain's turn.
        ((1, 1), 8, vec![1]),
    ] {
        let site = site(code, members, 2, 2);
        without(&site, &away).unwrap();
        without(&site, &[]).unwrap();
        without(&site, &of_domain(members, 2, 1)).unwrap();
        without(&site, &[]).unwrap();
        without(&site, &of_domain(members, 2, 0)).unwrap();
    }
}

#[test]
fn one_of_three_domains_is_lost_after_drives_of_the_others_were_replaced() {
    let mut site = site((2, 1), 9, 3, 3);
    for away in [vec![1], vec![1, 2]] {
        without(&site, &away).unwrap();
    }
    let new = [1, 2].map(|at| {
        site.replace(at);
        site.disks[at].clone()
    });
    life(&site, 3, &[1, 2], async |machine| {
        machine.replace(&new[0], 1, 77).await?;
        machine.replace(&new[1], 2, 78).await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.env.sleep(Duration::from_secs(300)).await;
        machine.array.close().await
    })
    .unwrap();
    without(&site, &[0, 3, 6]).unwrap();
}
