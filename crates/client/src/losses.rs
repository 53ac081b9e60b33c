//! Reports of lost writes of files, and of lost changes of names.

use crate::file_state::FileState;
use crate::restarts::lost;
use crate::session::Session;
use penstock_base::FileId;
use penstock_wire::Failure;
use std::cell::Cell;

/// The losses that were reported through one descriptor or need not be.
#[derive(Debug)]
pub struct Reported {
    /// Losses of writes to the file.
    writes: Cell<u64>,
    /// Losses of changes of names and attributes.
    names: Cell<u64>,
}

impl Session {
    /// For a descriptor opened now: it need not report losses that were reported before.
    pub(crate) fn reported(&self, file: FileId) -> Reported {
        let writes = self.files().with(file, |state| state.losses_told()).unwrap_or(0);
        Reported { writes: Cell::new(writes), names: Cell::new(self.restarts().name_losses_told()) }
    }

    /// Fails a close if writes of the file were lost. The caller of close may ignore errors, for example a
    /// program that is started while another thread opens files. So the loss is reported here and stays to be
    /// reported until the last close.
    pub(crate) fn tell_lost(&self, file: FileId, descriptor: &Reported) -> Result<(), Failure> {
        match self.losses(file) > descriptor.writes.get() {
            true => self.check_lost(file, FileState::reported_by_close),
            false => Ok(()),
        }
    }

    /// Returns how often writes of a file were lost; 0 if its state is not known.
    fn losses(&self, file: FileId) -> u64 {
        self.files().with(file, |state| state.losses()).unwrap_or(0)
    }

    /// Fails if writes of a file, or changes of names, were lost and this descriptor has not reported it.
    /// Every descriptor that was open reports a loss once, regardless of others.
    pub(crate) fn report_losses_to(&self, file: FileId, descriptor: &Reported) -> Result<(), Failure> {
        let names = self.restarts().report_lost_names_to(&descriptor.names);
        let losses = self.losses(file);
        if losses <= descriptor.writes.get() {
            return names;
        }
        descriptor.writes.set(losses);
        // Only the first descriptor to report a loss logs it.
        self.report_lost(file).and_then(|()| Err(lost(&format!("data written to inode {file}"))))
    }

    /// Fails, once, if writes of a file were lost.
    pub(crate) fn report_lost(&self, file: FileId) -> Result<(), Failure> {
        self.check_lost(file, FileState::reported).inspect_err(|failure| {
            self.files().forget_idle(file);
            tracing::error!(%failure, "lost writes are reported to a caller");
        })
    }

    /// Fails while a loss of writes of the file is unreported.
    pub(crate) fn refuse_lost(&self, file: FileId) -> Result<(), Failure> {
        self.check_lost(file, |_| ())
            .inspect_err(|failure| tracing::error!(%failure, "a rename over another file fails"))
    }

    /// Fails while nobody was told of a loss of writes of the file: a program that goes on would read older
    /// bytes than it has written.
    pub(crate) fn refuse_untold(&self, file: FileId) -> Result<(), Failure> {
        match self.files().with(file, |state| state.is_untold()) {
            Some(true) => Err(lost(&format!("data written to inode {file}"))),
            _ => Ok(()),
        }
    }

    fn check_lost(&self, file: FileId, report: impl FnOnce(&mut FileState)) -> Result<(), Failure> {
        let reported = |state: &mut FileState| state.is_lost().then(|| report(state));
        match self.files().with(file, reported).flatten() {
            Some(()) => Err(lost(&format!("data written to inode {file}"))),
            None => Ok(()),
        }
    }
}
