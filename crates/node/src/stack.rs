//! A stack: a data array, a metadata array with its key-value store, and a target.
//!
//! The key-value store of the first stack also has the names of the file system. The stacks of a store are
//! opened one by one: one that does not open keeps only its own data away.

use crate::error::StartError;
use crate::events::Events;
use crate::map_copies::{MapCopies, with_copy};
use crate::stack_arrays::StackArrays;
use penstock_array::Volume;
use penstock_base::num::{to_u16, to_usize};
use penstock_base::{DecodeError, Env, Gate, StackNo, TargetId};
use penstock_chunk::copies::{Copies, anchor_stripes};
use penstock_chunk::{Service, Target, TargetConfig, TargetMemory, TargetWork};
use penstock_kv::{AheadKv, Engine, Kv};
use penstock_meta::rows::Home;
use penstock_meta::{MetaError, NewStore, check_store};
use std::rc::Rc;
use tokio::sync::RwLock;

/// The name of the file system.
const FS_NAME: &str = "main";

/// A stack that serves.
pub(crate) struct Stack {
    pub(crate) arrays: StackArrays,
    pub(crate) kv: Rc<AheadKv>,
    pub(crate) target: Rc<Target>,
    /// The work of the names' stack for its target; none in that stack.
    pub(crate) work: Option<Rc<TargetWork>>,
    /// Serves data requests.
    pub(crate) service: Service,
    pub(crate) copies: Rc<MapCopies>,
}

/// The repair that follows a restore.
#[derive(Clone, Copy)]
pub(crate) struct RepairAfter {
    /// It may do without stacks that are away.
    pub(crate) may_lack: bool,
}

/// The parameters of the opening of a stack.
pub(crate) struct HowToOpen<'a> {
    pub(crate) env: &'a Env,
    pub(crate) events: &'a Rc<Events>,
    pub(crate) engine: Engine,
    /// The memory of a target.
    pub(crate) memory: TargetMemory,
    /// Stacks that were made anew and not repaired yet are opened for this repair only.
    pub(crate) repair: Option<RepairAfter>,
    /// A number that changes with every start, the same for all targets of a store.
    pub(crate) generation: u64,
    /// Stacks of the store.
    pub(crate) stacks: u16,
    /// Held shared by each request and each copy of the map.
    pub(crate) serving: &'a Rc<RwLock<()>>,
    /// The gate that every change of rows passes: a check sees all stacks as of one moment.
    pub(crate) gate: &'a Rc<Gate>,
}

/// A stack that was opened, with what else comes of that.
pub(crate) struct OpenedStack {
    pub(crate) stack: Stack,
    /// It was made anew from a copy of the map, now or before, and is not repaired yet.
    pub(crate) is_unrepaired: bool,
    /// The parameters of its row, if it has none yet.
    pub(crate) new: NewStore<'static>,
}

impl HowToOpen<'_> {
    /// The arrays of a stack as the rows of its key-value store name them.
    pub(crate) fn home(&self, of_stack: &StackArrays) -> Home {
        Home {
            pool: of_stack.data.pool(),
            data: of_stack.data.id(),
            stack: of_stack.number,
            target: of_stack.number.target(),
            is_one_of_several: self.stacks > 1,
        }
    }

    /// Opens the key-value store, if it is not open yet, and the target. Nothing but the opening itself has
    /// changed anything if this fails.
    pub(crate) async fn open(
        &self,
        of_stack: &StackArrays,
        open: Option<Rc<AheadKv>>,
    ) -> Result<OpenedStack, StartError> {
        let kv = match open {
            Some(kv) => kv,
            None => match of_stack.open_kv(self.env, self.engine).await {
                Ok(kv) => kv,
                Err(error) => return Err(with_copy(error.into(), of_stack).await),
            },
        };
        self.open_target(of_stack, &kv).await.inspect_err(|_| kv.retire())
    }

    async fn open_target(&self, of_stack: &StackArrays, kv: &Rc<AheadKv>) -> Result<OpenedStack, StartError> {
        let home = self.home(of_stack);
        let whole = Volume::whole(&of_stack.data);
        let (gate, shared): (Rc<Gate>, Rc<dyn Kv>) = (self.gate.clone(), kv.clone());
        // Nothing is changed for a later release.
        let row = match check_store(&*shared, home, || !whole.is_blank()).await {
            Ok(row) => row,
            Err(error) => return Err(with_copy(error.into(), of_stack).await),
        };
        let is_unrepaired = row.as_ref().is_some_and(|row| row.is_unrepaired);
        if is_unrepaired && self.repair.is_none() {
            return Err(StartError::Refused(
                "the store was made anew from a copy of the map, and not repaired yet: `penstock fs check --repair --map` goes on".into(),
            ));
        }
        let kept_stripes = match row {
            Some(row) => row.kept_stripes,
            None => to_u16(to_usize(anchor_stripes(whole.stripe_blocks()))),
        };
        if u64::from(kept_stripes) >= of_stack.data.geometry().stripes {
            let why = "it keeps more stripes than the data array has";
            return Err(MetaError::from(DecodeError::Bad { what: "row of the store", why }).into());
        }
        let (volume, anchors) = whole.split_end(kept_stripes.into());
        let config = TargetConfig {
            memory: self.memory,
            ..TargetConfig::for_volume(&volume, home.target, self.generation)
        };
        let target = Target::open(self.env, volume, shared, gate, config).await?;
        let copies = match kept_stripes {
            0 => None,
            _ => Some(Copies::open(self.env, &target, anchors).await),
        };
        let work = (!home.has_names()).then(|| TargetWork::new(&target));
        let copies = MapCopies::new(self.env, self.events, FS_NAME, (copies, self.serving));
        let stack = Stack {
            arrays: of_stack.clone(),
            kv: kv.clone(),
            service: work.as_ref().map_or_else(|| Service::new(&target), Service::with_work),
            work,
            target,
            copies,
        };
        Ok(OpenedStack { stack, is_unrepaired, new: NewStore { name: FS_NAME, home, kept_stripes } })
    }
}

impl Stack {
    /// Its number.
    pub(crate) fn number(&self) -> StackNo {
        self.arrays.number
    }

    /// Nothing goes on with it, and nothing more becomes durable.
    pub(crate) fn stop(&self) {
        self.target.stop();
        self.kv.stop();
        self.arrays.stop();
    }

    /// The number of its target.
    pub(crate) fn target_id(&self) -> TargetId {
        self.number().target()
    }
}
