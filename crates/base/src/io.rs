//! For whom and for what an I/O is done, from the header of a request down to the queue of a drive.

use std::time::Duration;

/// The purpose of an I/O, for fair sharing of queues. The numbers travel on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    /// A client's data.
    Client = 1,
    /// Name space and maps.
    Meta = 2,
    /// Appends to a log.
    Log = 3,
    /// Destage of log contents into stripes, and checkpoints.
    Destage = 4,
    /// Reconstruction of a lost drive.
    Rebuild = 5,
    /// Bringing a returned drive up to date.
    Resync = 6,
    /// Background verification.
    Scrub = 7,
}

impl Class {
    /// Decodes the number on the wire; none if this release does not know it.
    pub fn from_u8(raw: u8) -> Option<Self> {
        use Class::*;
        [Client, Meta, Log, Destage, Rebuild, Resync, Scrub].into_iter().find(|class| *class as u8 == raw)
    }
}

/// For whom and for what an I/O is done, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoContext {
    /// The tenant to which the I/O is charged; 0 is the system.
    pub tenant: u32,
    /// The class of the I/O.
    pub class: Class,
    /// The time by which the result is wanted, on the clock of the worker; none if there is no limit. Queues
    /// may go by it. No I/O fails because of it: a short limit fails no drive.
    pub wanted_by: Option<Duration>,
}

impl IoContext {
    /// The system's own I/O of a class, without a time limit.
    pub const fn system(class: Class) -> Self {
        Self { tenant: 0, class, wanted_by: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_have_the_numbers_of_the_first_release() {
        let classes: Vec<Option<Class>> = (0..=8).map(Class::from_u8).collect();
        use Class::*;
        let known = [Client, Meta, Log, Destage, Rebuild, Resync, Scrub].map(Some);
        assert_eq!(classes, [&[None][..], &known, &[None]].concat());
    }
}
