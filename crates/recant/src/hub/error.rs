//! What can go wrong between the Hub and a folder.

use std::path::PathBuf;

/// Why a repository could not be fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Nothing says where the cache is.
    #[error("there is no home folder to keep fetched models in; set HF_HOME or HF_HUB_CACHE to a folder")]
    NoCache,

    /// A text that is no repository's name.
    #[error("`{found}` is no repository; expected `owner/name` or `owner/name@revision`")]
    NoName {
        /// The text.
        found: String,
    },

    /// The server says that there is no such thing.
    #[error("{endpoint} has no model repository {repository}; check its name and revision")]
    NotFound {
        /// The repository and its revision.
        repository: String,
        /// The server.
        endpoint: String,
    },

    /// The server wants to know who asks. It says so of repositories that do not exist, too.
    #[error(
        "{endpoint} does not show the model repository {repository} {}: there is none of that name, or it is private or gated; \
         check the name, or set HF_TOKEN to a token that may read it",
        if *with_token { "to this token" } else { "without a token" }
    )]
    Unauthorized {
        /// The repository and its revision.
        repository: String,
        /// The server.
        endpoint: String,
        /// Whether a token was sent.
        with_token: bool,
    },

    /// The server knows who asks, and refuses.
    #[error(
        "{endpoint} refuses to give out the model repository {repository}: it is gated; accept its terms on its page, and set \
         HF_TOKEN to a token of the account that did"
    )]
    Gated {
        /// The repository and its revision.
        repository: String,
        /// The server.
        endpoint: String,
    },

    /// The repository has no model that is read here.
    #[error("the repository {repository} lacks {lacks}; it has {has}")]
    Lacks {
        /// The repository and its revision.
        repository: String,
        /// What was looked for.
        lacks: String,
        /// What is there instead.
        has: String,
    },

    /// Nobody was asked, and the cache does not have it.
    #[error(
        "{repository} is no folder here, and its files are not in the cache {}: {lacks}; the network was not asked, since \
         HF_HUB_OFFLINE is set: unset it, or fetch the repository beforehand",
        cache.display()
    )]
    Offline {
        /// The repository and its revision.
        repository: String,
        /// The cache.
        cache: PathBuf,
        /// What it lacks.
        lacks: String,
    },

    /// The server gave no usable answer, and the cache does not have it.
    #[error(
        "{repository} is no folder here, its files are not in the cache {}: {lacks}; and {endpoint} cannot be asked: {reason}",
        cache.display()
    )]
    Unreachable {
        /// The repository and its revision.
        repository: String,
        /// The cache.
        cache: PathBuf,
        /// What it lacks.
        lacks: String,
        /// The server.
        endpoint: String,
        /// What happened.
        reason: String,
    },

    /// A file did not arrive, or not whole.
    #[error("{file} of {repository} could not be fetched: {reason}; try again, what has arrived is kept")]
    Download {
        /// The repository and its revision.
        repository: String,
        /// The file.
        file: String,
        /// What happened.
        reason: String,
    },

    /// A file of the cache could not be read, written or removed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}
