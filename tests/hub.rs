//! Repositories of a hub that a small server plays: what is fetched, what is not, and what becomes of a download that goes
//! wrong.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::Result;
use recant::{Hub, HubError};
use serde_json::{json, Value};
use tempfile::TempDir;

const REPOSITORY: &str = "recant/demo-draft";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const SECRET: &str = "hf_secret";

/// How the server plays.
#[derive(Default)]
struct Play {
    /// Answers every question about the repository with this.
    status: Option<u16>,
    /// Wants the token.
    closed: bool,
    /// Breaks off answers that give this file after so many bytes, one number an answer.
    breaks: BTreeMap<String, Vec<usize>>,
    /// Says of this file that it has so many bytes.
    lies: BTreeMap<String, u64>,
    /// Gives files from the start, whatever part is asked for.
    deaf: bool,
    /// Keeps silent once it has sent so many bytes of this file, or where it is asked for the list (the empty name).
    silent: Option<(String, usize)>,
    /// Sends whoever asks for this file elsewhere, without saying where to.
    lost: Option<String>,
    /// What was asked for: path and range.
    asked: Vec<(String, Option<usize>)>,
}

struct Server {
    files: TempDir,
    address: String,
    play: Arc<Mutex<Play>>,
}

impl Server {
    /// One that has the demo draft model, and files that nobody needs.
    fn start() -> Result<Self> {
        let files = TempDir::new()?;
        let model = common::folder("demo-draft").ok_or("no demo-draft")?;
        for entry in std::fs::read_dir(model)? {
            let entry = entry?;
            std::fs::copy(entry.path(), files.path().join(entry.file_name()))?;
        }
        for extra in [
            "README.md",
            "pytorch_model.bin",
            "model-q4.gguf",
            "consolidated.safetensors",
        ] {
            std::fs::write(files.path().join(extra), "not needed")?;
        }
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("http://{}", listener.local_addr()?);
        let play = Arc::new(Mutex::new(Play::default()));
        let (root, shared) = (files.path().to_owned(), Arc::clone(&play));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away is no failure of the server.
                let _ = answer(&root, &shared, stream);
            }
        });
        Ok(Self { files, address, play })
    }

    fn play<T>(&self, change: impl FnOnce(&mut Play) -> T) -> T {
        change(&mut self.play.lock().expect("no server thread panics"))
    }

    fn hub(&self, cache: &Path) -> Result<Hub> {
        let mut hub = Hub::from_env()?;
        hub.endpoint = self.address.clone();
        hub.cache = cache.to_owned();
        hub.token = None;
        hub.offline = false;
        Ok(hub)
    }

    fn size(&self, file: &str) -> Result<usize> {
        Ok(std::fs::metadata(self.files.path().join(file))?.len() as usize)
    }

    /// The beginnings of the ranges in which a file was asked for, other than for its size.
    fn starts(&self, file: &str) -> Vec<usize> {
        let path = format!("/{REPOSITORY}/resolve/{COMMIT}/{file}");
        self.play(|play| {
            let asked = play.asked.iter().filter(|(asked, _)| *asked == path);
            asked.filter_map(|(_, start)| *start).collect()
        })
    }

    fn fetched(&self) -> BTreeSet<String> {
        let prefix = format!("/{REPOSITORY}/resolve/{COMMIT}/");
        self.play(|play| {
            let asked = play
                .asked
                .iter()
                .filter_map(|(path, _)| path.strip_prefix(&prefix));
            asked.map(str::to_owned).collect()
        })
    }
}

fn answer(root: &Path, play: &Mutex<Play>, mut stream: TcpStream) -> Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().ok_or("no request")??;
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(": ") {
            headers.insert(name.to_lowercase(), value.to_owned());
        }
    }
    let path = request.split(' ').nth(1).ok_or("no path")?;
    let path = path.split('?').next().unwrap_or(path).to_owned();
    let range = headers
        .get("range")
        .and_then(|range| range.strip_prefix("bytes="));
    let (start, probe) = match range.and_then(|range| range.split_once('-')) {
        Some((start, end)) => (start.parse()?, end == "0"),
        None => (0, false),
    };
    let mut play = play.lock().map_err(|_| "poisoned")?;
    play.asked.push((path.clone(), (!probe).then_some(start)));
    let bare =
        |status: u16| format!("HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    let known = headers.get("authorization").map(String::as_str) == Some("Bearer hf_secret");
    if play.closed && !known {
        return Ok(stream.write_all(bare(401).as_bytes())?);
    }
    let (api, files) = (
        format!("/api/models/{REPOSITORY}/revision/"),
        format!("/{REPOSITORY}/resolve/{COMMIT}/"),
    );
    if let Some(revision) = path.strip_prefix(&api) {
        if let Some(status) = play.status {
            return Ok(stream.write_all(bare(status).as_bytes())?);
        }
        if !["main", COMMIT].contains(&revision) {
            return Ok(stream.write_all(bare(404).as_bytes())?);
        }
        if play.silent.as_ref().is_some_and(|(name, _)| name.is_empty()) {
            drop(play);
            return keep_silent(&stream);
        }
        let listing = listing(root, &play)?.to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            listing.len()
        );
        return Ok(stream.write_all((head + &listing).as_bytes())?);
    }
    let file = path.strip_prefix(&files).filter(|file| root.join(file).is_file());
    let Some(file) = file else {
        return Ok(stream.write_all(bare(404).as_bytes())?);
    };
    if play.lost.as_deref() == Some(file) {
        return Ok(stream.write_all(bare(302).as_bytes())?);
    }
    let whole = std::fs::read(root.join(file))?;
    let start = if play.deaf { 0 } else { start };
    if start >= whole.len() {
        return Ok(stream.write_all(bare(416).as_bytes())?);
    }
    let body = match probe {
        true => &whole[..1],
        false => &whole[start..],
    };
    let promised = play.lies.get(file).copied().unwrap_or(whole.len() as u64);
    let head = format!(
        "HTTP/1.1 206 Partial\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{}/{promised}\r\nETag: \"{}\"\r\nX-Repo-Commit: \
         {COMMIT}\r\nConnection: close\r\n\r\n",
        body.len(),
        start + body.len() - 1,
        // Any name that is one of the file's own.
        file.replace(['.', '/'], "-"),
    );
    let breaks = play.breaks.get_mut(file).filter(|_| !probe);
    let sent = match breaks {
        Some(breaks) if !breaks.is_empty() => breaks.remove(0).min(body.len()),
        _ => body.len(),
    };
    let silent = play.silent.as_ref().filter(|(name, _)| name == file && !probe);
    let silent = silent.map(|(_, after)| *after);
    drop(play);
    stream.write_all(head.as_bytes())?;
    if let Some(after) = silent {
        stream.write_all(&body[..after])?;
        return keep_silent(&stream);
    }
    stream.write_all(&body[..sent])?;
    Ok(())
}

/// Leaves a connection open, and lets others go on, for as long as the process lives.
fn keep_silent(stream: &TcpStream) -> Result<()> {
    std::mem::forget(stream.try_clone()?);
    Ok(())
}

fn listing(root: &Path, play: &Play) -> Result<Value> {
    let mut siblings = Vec::new();
    for entry in std::fs::read_dir(root)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let size = play.lies.get(&name).copied().unwrap_or(entry.metadata()?.len());
        siblings.push(json!({"rfilename": name, "size": size}));
    }
    Ok(json!({"sha": COMMIT, "siblings": siblings}))
}

/// The files of a folder and what they hold.
fn contents(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        files.insert(name, std::fs::read(entry.path())?);
    }
    Ok(files)
}

fn fetch(hub: &Hub) -> std::result::Result<PathBuf, HubError> {
    hub.fetch(REPOSITORY, &mut |_, _| {})
}

/// What a fetch is refused with.
fn refusal(hub: &Hub) -> String {
    match fetch(hub) {
        Ok(folder) => format!("fetched into {}", folder.display()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_a_model_needs_is_fetched_whole_and_nothing_else() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let mut told = Vec::new();
    let folder = server
        .hub(cache.path())?
        .fetch(REPOSITORY, &mut |done, total| told.push((done, total)))?;
    assert_eq!(
        folder,
        cache
            .path()
            .join("models--recant--demo-draft/snapshots")
            .join(COMMIT)
    );
    let fetched = contents(&folder)?;
    let needed = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(fetched.keys().collect::<Vec<_>>(), needed);
    let there = contents(server.files.path())?;
    assert!(fetched.iter().all(|(name, bytes)| there[name] == *bytes));
    assert_eq!(server.fetched().iter().collect::<Vec<_>>(), needed);
    let size: usize = fetched.values().map(Vec::len).sum();
    assert_eq!(told.last(), Some(&(size as u64, size as u64)));
    assert!(told
        .windows(2)
        .all(|pair| pair[0].0 <= pair[1].0 && pair[1].0 <= pair[1].1));
    assert!(told.len() > 20, "told {} times", told.len());
    let model = recant::load(folder)?;
    assert!(!model.text().encode("hello")?.is_empty());
    Ok(())
}

#[test]
fn what_the_cache_has_is_not_fetched_again() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let mut hub = server.hub(cache.path())?;
    let first = fetch(&hub)?;
    server.play(|play| play.asked.clear());
    assert_eq!(fetch(&hub)?, first);
    assert_eq!(
        hub.fetch(&format!("{REPOSITORY}@{COMMIT}"), &mut |_, _| {})?,
        first
    );
    assert!(server.fetched().is_empty());
    // Neither without a network, nor without leave to use it.
    hub.endpoint = "http://127.0.0.1:9".to_owned();
    assert_eq!(fetch(&hub)?, first);
    hub.offline = true;
    assert_eq!(fetch(&hub)?, first);
    assert_eq!(
        hub.fetch(&format!("{REPOSITORY}@{COMMIT}"), &mut |_, _| {})?,
        first
    );
    Ok(())
}

#[test]
fn c054_shards_that_the_index_names_are_fetched_and_an_incomplete_cache_is_not_taken() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let files = server.files.path();
    std::fs::rename(
        files.join("model.safetensors"),
        files.join("model-00001-of-00002.safetensors"),
    )?;
    std::fs::write(files.join("model-00002-of-00002.safetensors"), "the second shard")?;
    // Beside shards, this is a stray.
    std::fs::write(files.join("model.safetensors"), "stray")?;
    let map = json!({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"});
    std::fs::write(
        files.join("model.safetensors.index.json"),
        json!({"weight_map": map}).to_string(),
    )?;
    let mut hub = server.hub(cache.path())?;
    let folder = fetch(&hub)?;
    assert!(folder.join("model-00002-of-00002.safetensors").exists());
    assert!(!folder.join("model.safetensors").exists());

    std::fs::remove_file(folder.join("model-00002-of-00002.safetensors"))?;
    hub.offline = true;
    let error = refusal(&hub);
    assert!(
        error.contains("it lacks model-00002-of-00002.safetensors"),
        "{error}"
    );
    hub.offline = false;
    std::fs::remove_file(files.join("model-00002-of-00002.safetensors"))?;
    let error = refusal(&hub);
    assert!(
        error.contains("lacks model-00002-of-00002.safetensors, which its index names"),
        "{error}"
    );
    let escape = json!({"weight_map": {"a": "../../model.safetensors"}}).to_string();
    std::fs::write(files.join("model.safetensors.index.json"), escape)?;
    let error = refusal(&server.hub(TempDir::new()?.path())?);
    assert!(error.contains("no file of the same folder"), "{error}");
    Ok(())
}

#[test]
fn a_download_that_breaks_off_is_gone_on_with() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let size = server.size("model.safetensors")?;
    let breaks = vec![size / 3, 0, size / 3];
    server.play(|play| play.breaks.insert("model.safetensors".to_owned(), breaks));
    let folder = fetch(&server.hub(cache.path())?)?;
    let there = contents(server.files.path())?;
    assert!(contents(&folder)?["model.safetensors"] == there["model.safetensors"]);
    assert_eq!(
        server.starts("model.safetensors"),
        [0, size / 3, size / 3, 2 * (size / 3)]
    );
    Ok(())
}

#[test]
fn a_download_that_breaks_off_too_often_is_gone_on_with_at_the_next_call() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let hub = server.hub(cache.path())?;
    server.play(|play| {
        play.breaks
            .insert("model.safetensors".to_owned(), vec![1000, 1000, 1000, 1000])
    });
    let error = refusal(&hub);
    assert!(
        error.contains("model.safetensors of recant/demo-draft@main"),
        "{error}"
    );
    let folder = fetch(&hub)?;
    let there = contents(server.files.path())?;
    assert!(contents(&folder)?["model.safetensors"] == there["model.safetensors"]);
    assert_eq!(server.starts("model.safetensors"), [0, 1000, 2000, 3000, 4000]);
    Ok(())
}

#[test]
fn what_cannot_be_gone_on_with_is_begun_again() -> Result<()> {
    // A server that gives the whole file again where the rest was asked for.
    let (server, cache) = (Server::start()?, TempDir::new()?);
    server.play(|play| {
        play.deaf = true;
        play.breaks.insert("model.safetensors".to_owned(), vec![1000]);
    });
    let there = contents(server.files.path())?;
    let folder = fetch(&server.hub(cache.path())?)?;
    assert!(contents(&folder)?["model.safetensors"] == there["model.safetensors"]);

    // Remains of another download that are too long, and such as have the right length.
    for extra in [1, 0] {
        let (server, cache) = (Server::start()?, TempDir::new()?);
        let blobs = cache.path().join("models--recant--demo-draft/blobs");
        std::fs::create_dir_all(&blobs)?;
        let size = server.size("model.safetensors")?;
        std::fs::write(blobs.join("model-safetensors.part"), vec![7; size + extra])?;
        let folder = fetch(&server.hub(cache.path())?)?;
        assert!(
            contents(&folder)?["model.safetensors"] == there["model.safetensors"],
            "{extra}"
        );
    }
    Ok(())
}

#[test]
fn a_file_of_another_size_than_promised_is_refused_and_not_kept() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let hub = server.hub(cache.path())?;
    let size = server.size("model.safetensors")? as u64;
    server.play(|play| play.lies.insert("model.safetensors".to_owned(), size + 4096));
    let error = refusal(&hub);
    assert!(
        error.contains(&format!("it should have {} bytes, {size} arrived", size + 4096)),
        "{error}"
    );
    let mut offline = hub.clone();
    offline.offline = true;
    assert!(refusal(&offline).contains("nothing of that revision"));
    server.play(|play| play.lies.clear());
    let folder = fetch(&hub)?;
    // A file that was cut short in the cache is fetched again.
    std::fs::write(folder.join("model.safetensors"), "short")?;
    let there = contents(server.files.path())?;
    assert!(contents(&fetch(&hub)?)?["model.safetensors"] == there["model.safetensors"]);
    Ok(())
}

#[test]
fn a_server_that_keeps_silent_is_given_up() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let mut hub = server.hub(cache.path())?;
    hub.timeout = Duration::from_millis(300);
    server.play(|play| play.silent = Some(("model.safetensors".to_owned(), 1000)));
    let start = Instant::now();
    let error = refusal(&hub);
    assert!(
        error.contains("model.safetensors") && error.contains("kept silent for 0.3 seconds"),
        "{error}"
    );
    // The list of files is waited for no longer, and the cache is as good as it is without a network.
    server.play(|play| play.silent = Some((String::new(), 0)));
    let error = refusal(&hub);
    assert!(
        error.contains("cannot be asked") && error.contains("timeout"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    Ok(())
}

#[test]
fn a_server_that_sends_elsewhere_without_saying_where_is_an_error() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    server.play(|play| play.lost = Some("model.safetensors".to_owned()));
    let error = refusal(&server.hub(cache.path())?);
    assert!(error.contains("model.safetensors"), "{error}");
    Ok(())
}

#[test]
fn a_repository_without_a_model_that_is_read_says_what_it_has() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let hub = server.hub(cache.path())?;
    std::fs::remove_file(server.files.path().join("model.safetensors"))?;
    let error = refusal(&hub);
    assert!(
        error.contains("weights in safetensors") && error.contains("model-q4.gguf"),
        "{error}"
    );
    std::fs::remove_file(server.files.path().join("config.json"))?;
    let error = refusal(&hub);
    assert!(error.contains("lacks config.json"), "{error}");
    assert!(server.fetched().is_empty(), "nothing was fetched in vain");
    Ok(())
}

#[test]
fn a_repository_that_is_not_there_or_not_open_is_told_apart() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let mut hub = server.hub(cache.path())?;
    for (status, words) in [
        (404, "has no model repository"),
        (401, "HF_TOKEN"),
        (403, "accept its terms"),
    ] {
        server.play(|play| play.status = Some(status));
        let error = refusal(&hub);
        assert!(
            error.contains(words) && error.contains(REPOSITORY),
            "{status}: {error}"
        );
    }
    let error = hub.fetch("recant/demo-draft@v9", &mut |_, _| {});
    let error = error.err().ok_or("fetched")?.to_string();
    server.play(|play| play.status = None);
    assert!(error.contains("recant/demo-draft@v9"), "{error}");

    server.play(|play| play.closed = true);
    let error = refusal(&hub);
    assert!(error.contains("without a token"), "{error}");
    hub.token = Some("hf_other".to_owned());
    let error = refusal(&hub);
    assert!(
        error.contains("to this token") && !error.contains("hf_other"),
        "{error}"
    );
    hub.token = Some(SECRET.to_owned());
    fetch(&hub)?;
    Ok(())
}

#[test]
fn without_a_network_the_error_says_what_was_looked_for_and_where() -> Result<()> {
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let mut hub = server.hub(cache.path())?;
    hub.endpoint = "http://127.0.0.1:9".to_owned();
    let error = refusal(&hub);
    let place = cache.path().display().to_string();
    for part in [
        "recant/demo-draft@main is no folder here",
        &place,
        "http://127.0.0.1:9 cannot be asked",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    hub.offline = true;
    let error = refusal(&hub);
    for part in ["recant/demo-draft@main", &place, "HF_HUB_OFFLINE"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    // A server that is out of order is as good as none.
    hub = server.hub(cache.path())?;
    server.play(|play| play.status = Some(503));
    assert!(refusal(&hub).contains("503"));
    let error = hub
        .fetch("no repository", &mut |_, _| {})
        .err()
        .ok_or("fetched")?;
    assert!(error.to_string().contains("owner/name"), "{error}");
    Ok(())
}

#[test]
fn load_takes_a_path_that_exists_and_else_asks_the_hub_of_the_environment() -> Result<()> {
    // The environment belongs to a whole process, so this one is another.
    let (server, cache) = (Server::start()?, TempDir::new()?);
    let child = |endpoint: &str, folder: &Path| -> Result<String> {
        let output = Command::new(std::env::current_exe()?)
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env("HF_ENDPOINT", endpoint)
            .env("HF_HUB_CACHE", cache.path())
            .env_remove("HF_HUB_OFFLINE")
            .current_dir(folder)
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let folder = TempDir::new()?;
    let output = child(&server.address, folder.path())?;
    assert!(
        output.contains("loaded") && output.contains("snapshots"),
        "{output}"
    );
    server.play(|play| play.asked.clear());
    std::fs::create_dir_all(folder.path().join(REPOSITORY))?;
    let output = child(&server.address, folder.path())?;
    assert!(
        output.contains("refused") && output.contains("a folder without config.json"),
        "{output}"
    );
    assert!(server.play(|play| play.asked.is_empty()), "the path wins");
    Ok(())
}

#[test]
#[ignore = "run by another test, in an environment of its own"]
fn child() {
    match recant::load(REPOSITORY) {
        Ok(model) => println!("loaded {}", model.path().display()),
        Err(error) => println!("refused: {error}"),
    }
}
