//! The store against cold starts, against a store that keeps everything whole, and against what happens to its folder.

mod cases;
mod folders;
mod property;
mod threads;

use recant_core::candle::{DType, Device, Storage, Tensor};
use recant_core::{Cache, CacheOptions, CacheStack, LanguageModel, Rows, Segment, Snapshot, Window};
use recant_testkit::ScriptedModel;

use super::{DrafterState, Hit, PromptStore, StoreOptions, StoredState};

const MODEL: &str = "scripted-1-64";
const PLENTY: usize = 1 << 30;
/// Bytes of a token of the scripted model: keys and values of two numbers each, and its id.
const ROW: usize = 16 + 4;
/// Bytes that belong to the last token of an entry: four hashes.
const LAST: usize = 16;

fn store(budget: usize) -> PromptStore {
    PromptStore::new(StoreOptions { budget, every: 16 })
}

fn windowed() -> CacheOptions {
    CacheOptions {
        window: Some(Window { window: 5, sink: 1 }),
        ..CacheOptions::default()
    }
}

/// `n` tokens; another `salt` gives another text from the first token on.
fn text(salt: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (7 * i + 3 + 11 * salt) % 64).collect()
}

fn fed(options: &CacheOptions, tokens: &[u32]) -> CacheStack {
    let model = ScriptedModel::new(1, 64);
    let mut stack = model.new_caches(options).expect("caches");
    feed(&model, &mut stack, tokens);
    stack
}

fn feed(model: &ScriptedModel, stack: &mut CacheStack, tokens: &[u32]) -> Option<Vec<f32>> {
    if tokens.is_empty() {
        return None;
    }
    let mut batch = [Segment::new(tokens, stack, Rows::Last)];
    let output = model.forward(&mut batch).expect("a forward");
    let logits = output.segments[0]
        .logits()
        .expect("logits")
        .to_vec2()
        .expect("rows");
    logits.into_iter().next()
}

/// The caches of a cold start.
fn cold(tokens: &[u32]) -> Snapshot {
    fed(&CacheOptions::default(), tokens)
        .snapshot()
        .expect("a snapshot")
}

fn plain(tokens: &[u32]) -> StoredState {
    StoredState {
        caches: cold(tokens),
        drafter: None,
    }
}

/// The state of a drafter called `kind`, whose rows depend on one token more than their own.
fn drafter(kind: &str, tokens: &[u32], pending: u32) -> DrafterState {
    let told = [tokens, &[pending]].concat();
    let model = ScriptedModel::new(2, 64);
    let mut stack = model.new_caches(&CacheOptions::default()).expect("caches");
    feed(&model, &mut stack, &told[1..]);
    let newest = Tensor::new(&[told[0] as f32, pending as f32], &Device::Cpu).expect("a row");
    DrafterState {
        snapshot: Snapshot::new(kind, told.len())
            .with_array("newest", newest)
            .with_parts(vec![stack.snapshot().expect("a snapshot")]),
        ahead: vec![pending],
    }
}

fn longest(store: &PromptStore, prompt: &[u32], most: usize) -> Option<Hit> {
    store
        .longest(MODEL, prompt, most, &mut |_| true)
        .expect("a search")
}

/// Fails unless a hit is what a cold start gives.
fn assert_cold(hit: &Hit, prompt: &[u32]) {
    let expected = cold(&prompt[..hit.tokens]);
    assert_eq!(hit.state.caches.len(), hit.tokens);
    assert_eq!(hit.state.caches.difference(&expected), None);
    if let Some(state) = &hit.state.drafter {
        assert_eq!(state.ahead, [prompt[hit.tokens]]);
        let expected = drafter(state.snapshot.kind(), &prompt[..hit.tokens], prompt[hit.tokens]);
        assert_eq!(state.snapshot.difference(&expected.snapshot), None);
    }
}

/// Bytes of all storage that a snapshot keeps alive.
fn storage(snapshot: &Snapshot) -> usize {
    let own: usize = snapshot.arrays().values().map(bytes_behind).sum();
    own + snapshot.parts().iter().map(storage).sum::<usize>()
}

fn bytes_behind(array: &Tensor) -> usize {
    let (storage, _) = array.storage_and_layout();
    match (&*storage, array.dtype()) {
        (Storage::Cpu(storage), DType::F32) => 4 * storage.as_slice::<f32>().expect("f32").len(),
        other => panic!("{:?} is not counted", other.1),
    }
}

/// What is really held, counted anew; and that nothing is held that no entry needs.
fn audit(store: &PromptStore) -> usize {
    let inner = store.lock();
    let nodes = inner.forest.export();
    let mut bytes = 0;
    for node in &nodes {
        let above = nodes.iter().filter(|other| {
            let longer = node.text.len() > other.text.len() && node.text.starts_with(&other.text);
            longer && other.key == node.key
        });
        let above = above.map(|other| other.text.len()).max().unwrap_or(0);
        bytes += storage(&node.rows) + 4 * (node.text.len() - above);
        if let Some(held) = &node.held {
            bytes += storage(&held.caches) + held.beside.as_deref().map_or(0, storage);
        }
        let needed = nodes
            .iter()
            .any(|other| other.held.is_some() && other.key == node.key && other.text.starts_with(&node.text));
        assert!(needed, "rows of {:?} are held for nobody", node.text);
    }
    let entries = nodes
        .iter()
        .filter(|node| node.held.is_some() && node.key.ahead.is_none());
    assert_eq!(inner.forest.entries(), entries.count());
    assert_eq!(inner.forest.bytes(), bytes);
    bytes
}
