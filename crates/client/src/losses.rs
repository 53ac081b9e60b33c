//! Reports of lost writes of files.

use crate::file_state::FileState;
use crate::restarts::lost;
use crate::session::Session;
use penstock_base::Ino;
use penstock_wire::Failure;
use std::cell::Cell;

impl Session {
    /// Fails a close if writes of the file were lost. The caller of close may ignore errors, for example a
    /// program that is started while another thread opens files. So the loss is reported here and stays to be
    /// reported until the last close.
    ///
    /// `seen` is the number of losses that were reported through this descriptor.
    pub(crate) fn tell_lost(&self, ino: Ino, seen: u64) -> Result<(), Failure> {
        match self.losses(ino) > seen {
            true => self.check_lost(ino, FileState::reported_by_close),
            false => Ok(()),
        }
    }

    /// Returns how often writes of a file were lost; 0 if its state is not known.
    fn losses(&self, ino: Ino) -> u64 {
        self.files().with(ino, |state| state.losses()).unwrap_or(0)
    }

    /// Fails if writes of a file were lost and this descriptor has not reported it. Every descriptor that was
    /// open reports a loss once, regardless of others.
    pub(crate) fn report_loss_to(&self, ino: Ino, seen: &Cell<u64>) -> Result<(), Failure> {
        let losses = self.losses(ino);
        if losses <= seen.get() {
            return Ok(());
        }
        seen.set(losses);
        // Only the first descriptor to report a loss logs it.
        self.report_lost(ino).and_then(|()| Err(lost(&format!("data written to inode {ino}"))))
    }

    /// Fails, once, if writes of a file were lost.
    pub(crate) fn report_lost(&self, ino: Ino) -> Result<(), Failure> {
        self.check_lost(ino, FileState::reported).inspect_err(|failure| {
            self.files().forget_idle(ino);
            tracing::error!(%failure, "lost writes are reported to a caller");
        })
    }

    /// Fails while a loss of writes of the file is unreported.
    pub(crate) fn refuse_lost(&self, ino: Ino) -> Result<(), Failure> {
        self.check_lost(ino, |_| ())
            .inspect_err(|failure| tracing::error!(%failure, "a rename over another file fails"))
    }

    fn check_lost(&self, ino: Ino, report: impl FnOnce(&mut FileState)) -> Result<(), Failure> {
        let reported = |state: &mut FileState| state.is_lost().then(|| report(state));
        match self.files().with(ino, reported).flatten() {
            Some(()) => Err(lost(&format!("data written to inode {ino}"))),
            None => Ok(()),
        }
    }
}
