//! One commit of a repository, into the cache.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use serde_json::Value;

use super::download::{download, Broken};
use super::id::RepoId;
use super::{Hub, HubError};
use crate::limited;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Files besides the weights, as far as a repository has them.
const BESIDE: [&str; 6] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// Bytes of the longest index that is read, as the loader has it.
const LONGEST_INDEX: u64 = 100_000_000;
/// How often a file that does not arrive whole is asked for.
const ATTEMPTS: u64 = 4;
/// Names of files shown in a message before the rest is only counted.
const SHOWN: usize = 6;

/// What the server says of a repository.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

/// One commit of a repository, to be fetched.
struct Fetcher<'a> {
    hub: &'a Hub,
    id: &'a RepoId,
    api: Api,
    /// The repository at the commit.
    commit: Repo,
    /// Where the commit's files come to lie.
    folder: PathBuf,
    /// All files of the repository, with their sizes as far as the server says.
    files: BTreeMap<String, Option<u64>>,
    /// Bytes of the files that are there, and of all that are needed.
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

pub(super) fn fetch(hub: &Hub, id: &RepoId, progress: &mut dyn FnMut(u64, u64)) -> Result<PathBuf, HubError> {
    let cached = cached(hub, id);
    if hub.offline {
        return cached.map_err(|lacks| HubError::Offline {
            repository: id.to_string(),
            cache: hub.cache.clone(),
            lacks,
        });
    }
    let listing = ApiBuilder::from_cache(Cache::new(hub.cache.clone()))
        .with_endpoint(hub.endpoint.clone())
        .with_token(hub.token.clone())
        .with_retries(0)
        .with_progress(false)
        .with_user_agent("recant", env!("CARGO_PKG_VERSION"))
        .build()
        .and_then(|api| Ok((list(&api, id, hub.timeout)?, api)));
    let (listing, api) = match listing {
        Ok(found) => found,
        Err(error) => {
            if let Some(refusal) = refusal(hub, id, &error) {
                return Err(refusal);
            }
            return cached.map_err(|lacks| HubError::Unreachable {
                repository: id.to_string(),
                cache: hub.cache.clone(),
                lacks,
                endpoint: hub.endpoint.clone(),
                reason: error.to_string(),
            });
        }
    };
    let cache = Cache::new(hub.cache.clone());
    let commit = at(id, &listing.sha);
    let mut fetcher = Fetcher {
        hub,
        id,
        folder: cache.repo(commit.clone()).pointer_path(&listing.sha),
        commit,
        api,
        files: listing
            .siblings
            .into_iter()
            .map(|file| (file.rfilename, file.size))
            .collect(),
        done: 0,
        total: 0,
        progress,
    };
    fetcher.all()?;
    // From here on the cache answers for the revision, not only for the commit.
    cache
        .repo(at(id, &id.revision))
        .create_ref(&listing.sha)
        .map_err(|source| HubError::Io {
            path: hub.cache.clone(),
            source,
        })?;
    Ok(fetcher.folder)
}

fn at(id: &RepoId, revision: &str) -> Repo {
    Repo::with_revision(id.name.clone(), RepoType::Model, revision.to_owned())
}

/// What the server has at the revision.
fn list(api: &Api, id: &RepoId, timeout: Duration) -> Result<Listing, ApiError> {
    let request = api.repo(at(id, &id.revision)).info_request();
    let request = request
        .query("blobs", "true")
        .config()
        .timeout_global(Some(timeout))
        .build();
    let mut response = request.call().map_err(Box::new)?;
    let text = response.body_mut().read_to_string().map_err(Box::new)?;
    let listing: Listing = serde_json::from_str(&text)
        .map_err(|error| std::io::Error::other(format!("its answer is no list of files: {error}")))?;
    let is_commit = !listing.sha.is_empty() && listing.sha.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_commit {
        return Err(std::io::Error::other("its answer names no commit").into());
    }
    Ok(listing)
}

/// What it means that the server answered with an error that asking again does not change.
fn refusal(hub: &Hub, id: &RepoId, error: &ApiError) -> Option<HubError> {
    let repository = id.to_string();
    let endpoint = hub.endpoint.clone();
    match status(error)? {
        401 => Some(HubError::Unauthorized {
            repository,
            endpoint,
            with_token: hub.token.is_some(),
        }),
        403 => Some(HubError::Gated { repository, endpoint }),
        404 => Some(HubError::NotFound { repository, endpoint }),
        _ => None,
    }
}

fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(code) => Some(code),
            _ => None,
        },
        _ => None,
    }
}

impl Fetcher<'_> {
    fn all(&mut self) -> Result<(), HubError> {
        if !self.files.contains_key(CONFIG) {
            return Err(self.lacks(CONFIG));
        }
        let mut beside: Vec<String> = BESIDE.map(str::to_owned).to_vec();
        let sharded = self.files.contains_key(INDEX);
        if sharded {
            beside.push(INDEX.to_owned());
        } else if !self.files.contains_key(SINGLE) {
            return Err(self.lacks("weights in safetensors (model.safetensors, or shards with an index)"));
        }
        beside.retain(|file| self.files.contains_key(file));
        self.fetch(&beside)?;
        let weights = if sharded {
            let shards = self.shards()?;
            if let Some(absent) = shards.iter().find(|shard| !self.files.contains_key(*shard)) {
                return Err(self.lacks(&format!("{absent}, which its index names")));
            }
            shards.into_iter().collect()
        } else {
            vec![SINGLE.to_owned()]
        };
        self.fetch(&weights)
    }

    fn shards(&self) -> Result<BTreeSet<String>, HubError> {
        shards(&self.folder).map_err(|reason| self.failed(INDEX, &reason))
    }

    fn fetch(&mut self, files: &[String]) -> Result<(), HubError> {
        let sizes = files.iter().filter_map(|file| self.files[file]);
        self.total += sizes.sum::<u64>();
        for file in files {
            let path = self.folder.join(file);
            let size = match std::fs::metadata(&path) {
                Ok(metadata) if self.files[file].is_none_or(|size| size == metadata.len()) => metadata.len(),
                Ok(_) => {
                    remove(&path)?;
                    self.fetch_one(file)?
                }
                Err(_) => self.fetch_one(file)?,
            };
            self.done += size;
            self.report(0);
        }
        Ok(())
    }

    /// Fetches a file whole, and gives its size.
    fn fetch_one(&mut self, file: &str) -> Result<u64, HubError> {
        let mut reason = String::new();
        for attempt in 0..ATTEMPTS {
            // The first pause is none: most connections that break can be had again at once.
            std::thread::sleep(Duration::from_millis(500 * attempt.saturating_sub(1).pow(2)));
            let mut promised = None;
            let (done, total, progress) = (self.done, self.total, &mut *self.progress);
            let mut tell = |arrived, size| {
                promised = Some(size);
                let now = done + arrived;
                progress(now, total.max(now));
            };
            match download(&self.api, &self.commit, file, self.hub.timeout, &mut tell) {
                Ok(path) => {
                    let found = std::fs::metadata(&path)
                        .map_err(|source| HubError::Io {
                            path: path.clone(),
                            source,
                        })?
                        .len();
                    let promised = self.files[file].or(promised).unwrap_or(found);
                    if found == promised {
                        return Ok(found);
                    }
                    // What is there is no beginning of the file that could be gone on with.
                    remove(&path)?;
                    reason = format!("it should have {promised} bytes, {found} arrived");
                }
                Err(Broken::Error(error)) => {
                    if let Some(refusal) = refusal(self.hub, self.id, &error) {
                        return Err(refusal);
                    }
                    if matches!(error, ApiError::InvalidResume) || status(&error) == Some(416) {
                        self.forget_part(file)?;
                    }
                    reason = error.to_string();
                }
                // The file stays locked until the connection ends, so asking again is no use.
                Err(Broken::Silent) => {
                    let seconds = self.hub.timeout.as_secs_f32();
                    return Err(self.failed(file, &format!("the server kept silent for {seconds} seconds")));
                }
                Err(Broken::Panicked) => reason = "the server's answer makes no sense".to_owned(),
            }
        }
        Err(self.failed(file, &reason))
    }

    /// Removes what a broken download left, where it is not the beginning of the file.
    fn forget_part(&self, file: &str) -> Result<(), HubError> {
        let url = self.api.repo(self.commit.clone()).url(file);
        let Ok(metadata) = self.api.metadata(&url) else {
            return Ok(());
        };
        let cache = Cache::new(self.hub.cache.clone());
        let blob = cache
            .repo(at(self.id, &self.id.revision))
            .blob_path(metadata.etag());
        remove(&blob.with_extension("part"))
    }

    fn report(&mut self, arrived: u64) {
        let now = self.done + arrived;
        (self.progress)(now, self.total.max(now));
    }

    fn lacks(&self, what: &str) -> HubError {
        let mut has: Vec<&str> = self.files.keys().map(String::as_str).take(SHOWN).collect();
        let more = format!("{} more", self.files.len().saturating_sub(SHOWN));
        if self.files.len() > SHOWN {
            has.push(&more);
        }
        HubError::Lacks {
            repository: self.id.to_string(),
            lacks: what.to_owned(),
            has: if has.is_empty() {
                "no files".to_owned()
            } else {
                has.join(", ")
            },
        }
    }

    fn failed(&self, file: &str, reason: &str) -> HubError {
        HubError::Download {
            repository: self.id.to_string(),
            file: file.to_owned(),
            reason: reason.to_owned(),
        }
    }
}

/// The folder that the cache has of a revision, or what it lacks.
fn cached(hub: &Hub, id: &RepoId) -> Result<PathBuf, String> {
    let repo = hub.cache.join(at(id, &id.revision).folder_name());
    let reference = repo.join("refs").join(&id.revision);
    // A revision that has no reference may be a commit.
    let commit = std::fs::read_to_string(reference).unwrap_or_else(|_| id.revision.clone());
    let folder = repo.join("snapshots").join(commit.trim());
    if !folder.is_dir() {
        return Err("it has nothing of that revision".to_owned());
    }
    let mut needed = vec![CONFIG.to_owned()];
    if folder.join(INDEX).exists() {
        needed.extend(shards(&folder)?);
    } else {
        needed.push(SINGLE.to_owned());
    }
    match needed.iter().find(|file| !folder.join(file).exists()) {
        Some(absent) => Err(format!("it lacks {absent}")),
        None => Ok(folder),
    }
}

/// The files that a folder's index names: plain names all, as the loader wants them.
fn shards(folder: &Path) -> Result<BTreeSet<String>, String> {
    let text = limited::read(&folder.join(INDEX), LONGEST_INDEX).map_err(|error| error.to_string())?;
    let index: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    let map = index["weight_map"]
        .as_object()
        .filter(|map| !map.is_empty())
        .ok_or("it has no `weight_map`")?;
    map.values()
        .map(|shard| match shard.as_str() {
            Some(name) if !name.contains(['/', '\\', ':']) && !name.starts_with('.') => Ok(name.to_owned()),
            _ => Err(format!("it names {shard}, which is no file of the same folder")),
        })
        .collect()
}

/// Removes a file, and what it points to.
fn remove(path: &Path) -> Result<(), HubError> {
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    for path in [target.as_path(), path] {
        match std::fs::remove_file(path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(HubError::Io {
                    path: path.to_owned(),
                    source,
                })
            }
            _ => {}
        }
    }
    Ok(())
}
