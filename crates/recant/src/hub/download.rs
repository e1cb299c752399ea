//! One file, by a client that waits as long as a server keeps silent.

use std::path::PathBuf;
use std::sync::mpsc::{sync_channel, RecvTimeoutError, SyncSender};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiError};
use hf_hub::api::Progress;
use hf_hub::Repo;

/// Why a file did not arrive.
pub(super) enum Broken {
    Error(ApiError),
    /// Nothing came for too long.
    Silent,
    /// The client panicked, as it does where a server redirects to nowhere.
    Panicked,
}

/// What a download tells of itself.
enum Told {
    /// How many bytes the file has.
    Size(u64),
    /// How many more have come.
    More(u64),
    End(Result<PathBuf, ApiError>),
}

/// Fetches a file into the cache. `tell` is given how many bytes have arrived, and how many the server says the file has.
///
/// The client reads on a thread of its own, since it takes no time-outs. One that is given up ends when its connection does.
pub(super) fn download(
    api: &Api,
    commit: &Repo,
    file: &str,
    timeout: Duration,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf, Broken> {
    let (sender, told) = sync_channel(64);
    let (repo, file) = (api.repo(commit.clone()), file.to_owned());
    let read = move || {
        let end = repo.download_with_progress(&file, Teller(sender.clone()));
        // Nobody listens any more if it took too long.
        let _ = sender.send(Told::End(end));
    };
    let thread = std::thread::Builder::new().name("recant-hub".to_owned());
    thread.spawn(read).map_err(|error| Broken::Error(error.into()))?;
    let (mut arrived, mut promised) = (0, 0);
    loop {
        match told.recv_timeout(timeout) {
            Ok(Told::Size(size)) => (arrived, promised) = (0, size),
            Ok(Told::More(more)) => arrived += more,
            Ok(Told::End(end)) => return end.map_err(Broken::Error),
            Err(RecvTimeoutError::Timeout) => return Err(Broken::Silent),
            Err(RecvTimeoutError::Disconnected) => return Err(Broken::Panicked),
        }
        tell(arrived, promised);
    }
}

struct Teller(SyncSender<Told>);

impl Teller {
    fn tell(&self, what: Told) {
        // As above.
        let _ = self.0.send(what);
    }
}

impl Progress for Teller {
    fn init(&mut self, size: usize, _: &str) {
        self.tell(Told::Size(size as u64));
    }

    fn update(&mut self, size: usize) {
        self.tell(Told::More(size as u64));
    }

    fn finish(&mut self) {}
}
