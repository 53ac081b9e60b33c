//! Tests of scheduled scrubs in the simulated world, in which a day takes no real time.

use crate::machine::{Machine, Site};
use crate::model::Model;
use penstock_base::LocalBoxFuture;
use penstock_node::{EventKind, Keeper};
use penstock_sim::World;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const PERIOD: Duration = Duration::from_secs(1800);

/// A file that survives the machine.
#[derive(Clone, Default)]
struct Kept(Rc<RefCell<Option<Vec<u8>>>>);

impl Keeper for Kept {
    fn load(&self) -> Result<Option<Vec<u8>>, String> {
        Ok(self.0.borrow().clone())
    }

    fn save(&self, bytes: Vec<u8>) -> LocalBoxFuture<'_, Result<(), String>> {
        *self.0.borrow_mut() = Some(bytes);
        Box::pin(async { Ok(()) })
    }
}

fn texts(machine: &Machine, wanted: EventKind) -> Vec<String> {
    let events = machine.node.events().after(0, 1000).unwrap();
    events
        .into_iter()
        .filter(|event| event.kind == wanted)
        .map(|event| event.object + ": " + &event.text)
        .collect()
}

#[test]
fn scrubs_come_when_they_are_due_and_go_on_after_a_restart() {
    let (site, kept, model) = (Site::new(), Kept::default(), Model::default());
    let world = World::new(70);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        for _ in 0..25 {
            model.step(&machine, 1).await.unwrap();
        }
        machine.client.sync_all().await.unwrap();
        machine.node.schedule_scrubs(Some(PERIOD), Rc::new(kept.clone()));
        let env = &machine.env;
        env.sleep(PERIOD / 2).await;
        assert!(texts(&machine, EventKind::ScrubBegun).is_empty(), "a young store is not scrubbed yet");
        env.sleep(PERIOD).await;
        assert_eq!(texts(&machine, EventKind::ScrubEnded).len(), 2, "each array once");
        let reports = machine.node.array_reports(machine.node.arrays());
        assert!(reports.iter().all(|report| report.last_scrub.as_ref().is_some_and(|last| last.is_clean())));
        env.sleep(PERIOD * 2).await;
        assert!(texts(&machine, EventKind::ScrubEnded).len() >= 4, "and again");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();

    // A scrub that was running at a power cut, as saved, with a position in the middle.
    let mut contents: serde_json::Value = serde_json::from_slice(kept.0.borrow().as_ref().unwrap()).unwrap();
    for record in contents["arrays"].as_object_mut().unwrap().values_mut() {
        let mut running = record["last"].clone();
        running["ended_ns"] = 0.into();
        running["next_stripe"] = 1.into();
        running["stripes"] = 1.into();
        running["repaired_blocks"] = 5.into();
        record["running"] = running;
    }
    *kept.0.borrow_mut() = Some(serde_json::to_vec(&contents).unwrap());
    let world = World::new(71);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.node.schedule_scrubs(Some(PERIOD), Rc::new(kept.clone()));
        machine.env.sleep(Duration::from_secs(120)).await;
        let begun = texts(&machine, EventKind::ScrubBegun);
        assert!(
            begun.len() == 2 && begun.iter().all(|text| text.ends_with("goes on at stripe 1")),
            "{begun:?}"
        );
        let ended = texts(&machine, EventKind::ScrubEnded);
        assert!(ended.len() == 2 && ended.iter().all(|text| text.contains("5 blocks repaired")), "{ended:?}");
        // A requested scrub begins at the start, and its result replaces the last one.
        let asked = machine.node.scrub(&machine.node.arrays()[0]).await.unwrap();
        assert!(asked.clean && asked.stripes > 0, "{asked:?}");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

#[test]
fn a_scrub_that_is_asked_for_takes_the_place_of_a_scheduled_one() {
    let (site, model) = (Site::new(), Model::default());
    let world = World::new(72);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        for _ in 0..25 {
            model.step(&machine, 1).await.unwrap();
        }
        machine.client.sync_all().await.unwrap();
        let unreadable = Kept(Rc::new(RefCell::new(Some(b"noise".to_vec()))));
        machine.node.schedule_scrubs(Some(Duration::from_nanos(1)), Rc::new(unreadable));
        while texts(&machine, EventKind::ScrubBegun).is_empty() {
            machine.env.sleep(Duration::from_micros(50)).await;
        }
        for array in machine.node.arrays() {
            assert!(machine.node.scrub(array).await.unwrap().clean);
        }
        let ended = texts(&machine, EventKind::ScrubEnded);
        assert!(ended.iter().filter(|text| text.contains("stripes")).count() >= 2, "{ended:?}");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}
