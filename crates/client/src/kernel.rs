//! The kernel's caches behind a client that is a mount.

use penstock_base::{Env, FileId, LocalBoxFuture};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use tokio::sync::Semaphore;

/// Drops of pages in the background that run at the same time. Each may wait for a lease, so they must not
/// use up the turns of those that give up leases.
const MOST_SOON: usize = 32;

/// Control over the kernel's caches, for a client that is a mount.
pub trait KernelCache {
    /// Drops the pages of these bytes of a file; pages that programs have changed are written back first.
    /// Waits for requests that have such a page locked.
    fn drop_pages(&self, file: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()>;
    /// Completes when the kernel no longer uses a name or an attribute that it got before this call.
    fn names_expire(&self) -> LocalBoxFuture<'_, ()>;
    /// Completes when the kernel no longer uses attributes of an inode that it got before this call, nor
    /// names of a directory. A kernel that caches none has nothing to do.
    fn forget_attributes(&self, _file: FileId) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
    /// Drops the pages that programs see, of files with these sizes, while no request is answered. Pages that
    /// requests have locked stay and are not waited for. If that has not succeeded `within` this time while
    /// the lapse still `lasts`, the mount serves nothing any more.
    fn hide_pages<'a>(
        &'a self,
        files: Vec<(FileId, u64)>,
        within: std::time::Duration,
        lasts: &'a dyn Fn() -> bool,
    ) -> LocalBoxFuture<'a, ()>;
}

/// The kernel behind a client, if it is a mount.
pub(crate) struct Kernel {
    env: Env,
    cache: RefCell<Option<Rc<dyn KernelCache>>>,
    soon: Rc<Semaphore>,
}

impl Kernel {
    pub(crate) fn new(env: &Env) -> Self {
        Self { env: env.clone(), cache: RefCell::default(), soon: Rc::new(Semaphore::new(MOST_SOON)) }
    }

    /// Sets the kernel, or with `None` takes it away.
    pub(crate) fn set(&self, cache: Option<Rc<dyn KernelCache>>) {
        *self.cache.borrow_mut() = cache;
    }

    /// True if there is a kernel.
    pub(crate) fn is_there(&self) -> bool {
        self.cache.borrow().is_some()
    }

    /// Returns the kernel, if there is one.
    pub(crate) fn cache(&self) -> Option<Rc<dyn KernelCache>> {
        self.cache.borrow().clone()
    }

    /// Drops the pages of these bytes of a file, if there is a kernel.
    pub(crate) async fn drop_pages(&self, file: FileId, bytes: Range<u64>) {
        if let Some(cache) = self.cache() {
            cache.drop_pages(file, bytes).await;
        }
    }

    /// Makes the kernel drop its pages of a file in the background, after the reply in progress has been
    /// sent.
    pub(crate) fn drop_pages_soon(&self, file: FileId) {
        if let Some(cache) = self.cache() {
            let soon = self.soon.clone();
            let drop_them = async move {
                let _turn = soon.acquire().await;
                cache.drop_pages(file, 0..u64::MAX).await;
            };
            self.env.spawn("drop pages", Box::pin(drop_them));
        }
    }
}
