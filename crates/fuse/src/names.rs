//! Serves requests on names: lookup, create, link, unlink, rename and forget.

use crate::abi::{BatchForgetIn, CreateIn, ForgetOne, MkdirIn, MknodIn, Rename2In, op};
use crate::attr::{entry, errno, stranger};
use crate::device::{Answer, Request};
use crate::last_lookups::{Place, Row};
use crate::nodes::is_directory;
use crate::session::{NamesOf, Session};
use penstock_base::FileId;
use penstock_client::{Attr, Failure};
use penstock_wire::metadata::{MakeRequest, RenameRequest, Time};
use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

/// Most looks at two names, if their directories change meanwhile.
const TOGETHER_TRIES: u32 = 3;

impl Session {
    /// The file of a node that a request names beside its own.
    pub(crate) fn file(&self, nodeid: u64) -> Result<FileId, Errno> {
        self.nodes.file(nodeid).ok_or(Errno::STALE)
    }

    /// The file of a node that a request names beside its own, for an operation within one branch.
    fn file_beside(&self, request: &Request, nodeid: u64) -> Result<FileId, Errno> {
        let file = self.file(nodeid)?;
        if file.branch == request.file.branch { Ok(file) } else { Err(Errno::XDEV) }
    }

    /// The reply to a request for a name that was begun after `names` was made.
    fn entry(&self, names: NamesOf, name: &[u8], result: Result<Attr, Failure>) -> Result<Answer, Errno> {
        let attr = result.map_err(|failure| errno(&failure))?;
        self.cache.is_answered(attr.file(), attr.size);
        let entry = entry(&self.nodes, &attr, (self.valid_name(names, name), self.valid(&attr)));
        self.nodes.note(&attr);
        Ok(Answer::of(&entry))
    }

    /// Builds the request to create a name. `skip` bytes of arguments come before the name in the body.
    fn make_request(&self, request: &Request, skip: usize, mode: u32) -> Result<MakeRequest, Errno> {
        Ok(MakeRequest {
            dir: request.file.ino.0,
            name: request.name(skip, 0)?.to_vec(),
            mode,
            uid: request.header.uid,
            gid: request.header.gid,
            ..MakeRequest::default()
        })
    }

    async fn make_entry(&self, request: &Request, make: MakeRequest) -> Result<Answer, Errno> {
        let (names, name) = (self.names_of(request.file), make.name.clone());
        self.entry(names, &name, self.client.make(request.file.branch, make).await)
    }

    pub(crate) async fn lookup(&self, request: &Request) -> Result<Answer, Errno> {
        let (names, name) = (self.names_of(request.file), request.name(0, 0)?);
        let (last, thread) = (&self.cache.last_lookups, request.header.pid);
        let row = (!self.client.is_alone()).then(|| last.take(thread));
        let (cache, owned) = (&self.cache, self.client.owns_all());
        let lookup = cache.last_found.begins(cache.serving.get(), owned, cache.env().now());
        let found = self.client.lookup(request.file, name).await;
        if let (Some(lookup), Ok(attr)) = (lookup, &found) {
            self.cache.last_found.ends(lookup, attr);
        }
        if row.is_some() || !self.client.is_alone() {
            let mut row = row.unwrap_or_else(|| last.take(thread));
            let is_stranger = match &found {
                Ok(attr) => self.is_stranger(attr, (request.file, name), &mut row).await,
                Err(_) => false,
            };
            last.keep(thread, row);
            if let Some(attr) = found.as_ref().ok().filter(|_| is_stranger) {
                return Ok(Answer::of(&stranger(&self.nodes, attr)));
            }
        }
        self.entry(names, name, found)
    }

    /// Notes a file that a thread gets by a name. Returns true if it must not get it: it has just got it by
    /// another one, and not both are known to be there at one moment.
    async fn is_stranger(&self, attr: &Attr, place: Place<'_>, row: &mut Row) -> bool {
        if let Some(other) = row.other(attr.file(), place) {
            // An error of the other name says nothing about this one.
            let found = self.are_together(attr, other, place).await;
            let are_together = found.unwrap_or_else(|failure| {
                tracing::debug!(%failure, "two names of a file cannot be looked at together");
                false
            });
            if !are_together {
                return true;
            }
        }
        row.gets(attr.file(), place);
        false
    }

    /// True if two names are names of one file at one moment. False if they are not, or if others change
    /// their directories all the time.
    async fn are_together(&self, attr: &Attr, one: Place<'_>, other: Place<'_>) -> Result<bool, Failure> {
        if attr.nlink <= 1 || is_directory(attr) {
            return Ok(false);
        }
        for _ in 0..TOGETHER_TRIES {
            let before = self.changed([one.0, other.0]).await?;
            for (dir, name) in [one, other] {
                if self.client.lookup(dir, name).await?.file() != attr.file() {
                    return Ok(false);
                }
            }
            if self.changed([one.0, other.0]).await? == before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The times at which two directories were changed last.
    async fn changed(&self, dirs: [FileId; 2]) -> Result<[Time; 2], Failure> {
        let mut times = [Time::default(); 2];
        for (time, dir) in times.iter_mut().zip(dirs) {
            *time = self.client.get_attr(dir).await?.ctime;
        }
        Ok(times)
    }

    pub(crate) async fn mknod(&self, request: &Request) -> Result<Answer, Errno> {
        let arguments: MknodIn = request.argument()?;
        let make = self.make_request(request, size_of::<MknodIn>(), arguments.mode)?;
        let (rdev, umask) = (arguments.rdev, arguments.umask);
        self.make_entry(request, MakeRequest { rdev, umask, ..make }).await
    }

    pub(crate) async fn mkdir(&self, request: &Request) -> Result<Answer, Errno> {
        let MkdirIn { mode, umask } = request.argument()?;
        let make = self.make_request(request, size_of::<MkdirIn>(), 0o040_000 | (mode & 0o7777))?;
        self.make_entry(request, MakeRequest { umask, ..make }).await
    }

    pub(crate) async fn symlink(&self, request: &Request) -> Result<Answer, Errno> {
        let make = self.make_request(request, 0, 0o120_777)?;
        let target = request.name(0, 1)?.to_vec();
        self.make_entry(request, MakeRequest { target, ..make }).await
    }

    /// Serves CREATE, and TMPFILE (`nameless`), which creates a file without a name.
    pub(crate) async fn create(&self, request: &Request, nameless: bool) -> Result<Answer, Errno> {
        let CreateIn { mode, umask, flags, .. } = request.argument()?;
        // For a file without a name the kernel sends a name of its own, which is not used.
        let make = self.make_request(request, size_of::<CreateIn>(), 0o100_000 | (mode & 0o7777))?;
        let make = MakeRequest { open: true, nameless, umask, ..make };
        let look = self.capabilities.look(self.client.owns_all());
        let (names, name) = (self.names_of(request.file), make.name.clone());
        let made = self.client.make(request.file.branch, make).await;
        let attr = made.map_err(|failure| match errno(&failure) {
            // Another client created the name first. ESTALE makes the kernel look it up again, and open the
            // file with its own checks.
            Errno::EXIST if !OFlags::from_bits_retain(flags).contains(OFlags::EXCL) => Errno::STALE,
            other => other,
        })?;
        self.capabilities.note_none(look, attr.file());
        let opened = self.opened(attr.file(), flags, attr.size).await.map_err(|failure| errno(&failure))?;
        let valid = (self.valid_name(names, &name), self.valid(&attr));
        let mut bytes = entry(&self.nodes, &attr, valid).as_bytes().to_vec();
        self.nodes.note(&attr);
        bytes.extend_from_slice(opened.as_bytes());
        Ok(Answer::Bytes(bytes))
    }

    pub(crate) async fn link(&self, request: &Request) -> Result<Answer, Errno> {
        let old = self.file_beside(request, request.argument()?)?;
        let name = request.name(size_of::<u64>(), 0)?;
        let names = self.names_of(request.file);
        self.entry(names, name, self.client.link(old, request.file, name).await)
    }

    pub(crate) async fn unlink(&self, request: &Request, directory: bool) -> Result<Answer, Errno> {
        let result = self.client.unlink(request.file, request.name(0, 0)?, directory).await;
        self.nodes.unlinked(&result.map_err(|failure| errno(&failure))?);
        Ok(Answer::Done)
    }

    pub(crate) async fn rename(&self, request: &Request) -> Result<Answer, Errno> {
        let new_dir: u64 = request.argument()?;
        self.rename_with(request, size_of::<u64>(), new_dir, RenameFlags::empty()).await
    }

    pub(crate) async fn rename2(&self, request: &Request) -> Result<Answer, Errno> {
        let arguments: Rename2In = request.argument()?;
        let flags = RenameFlags::from_bits_retain(arguments.flags);
        self.rename_with(request, size_of::<Rename2In>(), arguments.newdir, flags).await
    }

    async fn rename_with(
        &self,
        request: &Request,
        skip: usize,
        new_dir: u64,
        flags: RenameFlags,
    ) -> Result<Answer, Errno> {
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE | RenameFlags::WHITEOUT).contains(flags) {
            return Err(Errno::INVAL);
        }
        let rename = RenameRequest {
            dir: request.file.ino.0,
            name: request.name(skip, 0)?.to_vec(),
            new_dir: self.file_beside(request, new_dir)?.ino.0,
            new_name: request.name(skip, 1)?.to_vec(),
            no_replace: flags.contains(RenameFlags::NOREPLACE),
            exchange: flags.contains(RenameFlags::EXCHANGE),
            whiteout: flags.contains(RenameFlags::WHITEOUT),
            uid: request.header.uid,
            gid: request.header.gid,
            start: 0,
            found: None,
        };
        let old = (request.file, request.name(skip, 0)?);
        let new = (self.file(new_dir)?, request.name(skip, 1)?);
        let moves = [(old, new), (new, old)];
        let moves = if rename.exchange { &moves[..] } else { &moves[..1] };
        let _moving = self.cache.given.names_move(&[old, new]);
        self.before_names_move(moves).await?;
        let replaced =
            self.client.rename(request.file.branch, rename).await.map_err(|failure| errno(&failure))?;
        replaced.iter().for_each(|attr| self.nodes.unlinked(attr));
        Ok(Answer::Done)
    }

    /// The kernel is about to move names from one place to another. It goes on using each for as long as it
    /// would have used the old one, so the new directory must have a lease by then, under which the name can
    /// be told to expire. If there is none to be had, the old names expire first. The kernel gets none of
    /// them meanwhile.
    ///
    /// A name that the kernel is being told to forget, and that stays in its directory, needs no other lease:
    /// the one that is revoked lasts until the kernel has forgotten the new name too.
    async fn before_names_move(&self, moves: &[(Place<'_>, Place<'_>)]) -> Result<(), Errno> {
        let ends = moves.iter().filter_map(|((dir, name), _)| self.cache.given.name_ends(*dir, name));
        let Some(end) = ends.max() else { return Ok(()) };
        let has_lease = |dir: FileId| self.client.caches_names(dir, self.client.lease_on_names(dir));
        let is_covered = |((dir, name), (to, _)): &(Place<'_>, Place<'_>)| {
            has_lease(*to) || dir == to && !self.cache.given.has_name(*dir, name)
        };
        if !moves.iter().all(is_covered) {
            for (_, (dir, _)) in moves {
                self.client.get_attr(*dir).await.map_err(|failure| errno(&failure))?;
            }
        }
        if moves.iter().all(is_covered) {
            // In the same step: a lease that is revoked from here on takes the new names with it. The kernel
            // has both directories locked, and takes in a notice on the new name after the rename only.
            for (old, new) in moves {
                self.cache.given.moves(*old, *new);
                if has_lease(new.0) {
                    self.cache.given.name(new.0, new.1);
                }
            }
            return Ok(());
        }
        let env = self.cache.env();
        env.sleep(end.saturating_sub(env.now())).await;
        Ok(())
    }

    /// Takes in FORGET and BATCH_FORGET, which have no reply.
    pub(crate) fn forget(&self, request: &Request) -> Result<Answer, Errno> {
        if request.header.opcode == op::FORGET {
            self.nodes.forget(request.header.nodeid, request.argument()?);
            return Ok(Answer::Done);
        }
        let BatchForgetIn { count, .. } = request.argument()?;
        let forgotten = request.body.get(size_of::<BatchForgetIn>()..).unwrap_or_default();
        let each = forgotten.chunks_exact(size_of::<ForgetOne>()).take(count as usize);
        for bytes in each {
            let ForgetOne { nodeid, nlookup } = ForgetOne::read_from_bytes(bytes).map_err(|_| Errno::IO)?;
            self.nodes.forget(nodeid, nlookup);
        }
        Ok(Answer::Done)
    }
}
