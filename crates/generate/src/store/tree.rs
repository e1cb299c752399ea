//! What is stored, by its tokens: the part of the store that its lock guards. Nothing here copies an array.
//!
//! One tree for each model and shape of snapshot. A node holds the rows of the tokens on its edge; where a prompt was put it
//! is an *entry* and also holds what belongs to its last token alone. Rows stay as long as an entry at or below them needs
//! them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use recant_core::Snapshot;

use super::key::Key;

/// Never used twice, so an id tells whether a node is still the one that was seen.
type Id = u64;

/// What an entry holds beside rows.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) caches: Arc<Snapshot>,
    /// What a drafter's state is made of beside its caches.
    pub(super) beside: Option<Arc<Snapshot>>,
}

impl Held {
    fn bytes(&self) -> usize {
        self.caches.bytes() + self.beside.as_ref().map_or(0, |beside| beside.bytes())
    }
}

struct Entry {
    held: Held,
    used: u64,
    of_model: bool,
}

struct Node {
    /// A node, or the root of a tree.
    parent: Id,
    start: usize,
    /// At least one token.
    edge: Vec<u32>,
    rows: Arc<Snapshot>,
    entry: Option<Entry>,
}

impl Node {
    /// Bytes of the edge and its rows.
    fn bytes(&self) -> usize {
        self.rows.bytes() + bytes_of_tokens(self.edge.len())
    }

    /// Where it is found.
    fn place(&self) -> (Id, u32) {
        (self.parent, self.edge.first().copied().unwrap_or_default())
    }
}

pub(super) fn bytes_of_tokens(tokens: usize) -> usize {
    tokens * size_of::<u32>()
}

/// How far a text is in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// The nodes whose edges are all of the text's first tokens, from the top.
    path: Vec<Id>,
    /// Tokens on their edges.
    end: usize,
    /// The node below them with whose edge the text begins to go on but does not all the way, and how many tokens of it
    /// agree: at least one.
    within: Option<(Id, usize)>,
}

impl Place {
    /// Tokens of the text that the tree has.
    fn agreed(&self) -> usize {
        self.end + self.within.map_or(0, |(_, agreed)| agreed)
    }
}

/// What has to be cut before a prompt can be put, which is done without the lock.
pub(super) struct Plan {
    /// None where there is no tree yet.
    place: Option<Place>,
    /// The rows to be cut in two, and where.
    pub(super) split: Option<(Arc<Snapshot>, usize)>,
    /// The first token that the tree lacks, if any.
    pub(super) tail: usize,
    pub(super) lacks_rows: bool,
}

/// What was cut as a [`Plan`] says.
pub(super) struct Cut {
    pub(super) split: Option<[Arc<Snapshot>; 2]>,
    /// Absent where the tree has rows of all tokens.
    pub(super) tail: Option<Arc<Snapshot>>,
}

/// The room that a put may take.
pub(super) struct Room {
    /// Bytes that all entries may take together.
    pub(super) budget: usize,
    /// Whether entries may be evicted.
    pub(super) evict: bool,
    /// How many were.
    pub(super) evicted: u64,
}

/// What became of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is stored.
    Stored,
    /// There was no room, and none was to be made.
    Full,
    /// The tree changed since the plan was made.
    Stale,
}

/// The entries along one text in one tree.
pub(super) struct Found {
    pub(super) rows: Vec<Arc<Snapshot>>,
    pub(super) entries: Vec<FoundEntry>,
}

pub(super) struct FoundEntry {
    pub(super) id: Id,
    pub(super) tokens: usize,
    /// How many of the rows are its own.
    pub(super) depth: usize,
    pub(super) held: Held,
    used: u64,
}

/// The state of a drafter, and the rows it needs.
pub(super) struct FoundDrafter {
    pub(super) found: Found,
    pub(super) entry: FoundEntry,
    pub(super) ahead: usize,
}

/// One node, as it is written to files.
pub(super) struct Exported {
    pub(super) key: Arc<Key>,
    pub(super) text: Vec<u32>,
    pub(super) rows: Arc<Snapshot>,
    pub(super) held: Option<Held>,
}

/// All trees.
#[derive(Default)]
pub(super) struct Forest {
    roots: BTreeMap<Arc<Key>, Id>,
    nodes: HashMap<Id, Node>,
    /// Nodes by their parent and the first token of their edge.
    children: BTreeMap<(Id, u32), Id>,
    /// Entries by when they were last used.
    order: BTreeMap<u64, Id>,
    /// How many of them are of a model's own caches.
    of_models: usize,
    /// Ids given and uses counted so far.
    serial: u64,
    bytes: usize,
}

impl Forest {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Entries of models' own caches.
    pub(super) fn entries(&self) -> usize {
        self.of_models
    }

    fn next(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    fn walk(&self, root: Id, tokens: &[u32]) -> Place {
        let mut place = Place {
            path: Vec::new(),
            end: 0,
            within: None,
        };
        let mut above = root;
        while let Some(first) = tokens.get(place.end) {
            let child = self.children.get(&(above, *first));
            let Some((&id, node)) = child.and_then(|id| Some((id, self.nodes.get(id)?))) else {
                break;
            };
            let ours = &tokens[place.end..];
            let agreed = node.edge.iter().zip(ours).take_while(|(a, b)| a == b).count();
            if agreed < node.edge.len() {
                place.within = Some((id, agreed));
                break;
            }
            place.path.push(id);
            place.end += agreed;
            above = id;
        }
        place
    }

    fn trees_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = (&'a Key, Id)> + 'a {
        let of_model = self.roots.iter().filter(move |(key, _)| key.model == model);
        of_model.map(|(key, root)| (key.as_ref(), *root))
    }

    /// The node that ends where `tokens` do.
    fn node_at(&self, root: Id, tokens: &[u32]) -> Option<Id> {
        let place = self.walk(root, tokens);
        place.path.last().copied().filter(|_| place.end == tokens.len())
    }

    /// The entry that ends where `tokens` do.
    fn entry_at(&self, root: Id, tokens: &[u32]) -> Option<Id> {
        let node = self.node_at(root, tokens);
        node.filter(|id| self.nodes.get(id).is_some_and(|node| node.entry.is_some()))
    }

    pub(super) fn contains(&self, model: &str, tokens: &[u32]) -> bool {
        let mut trees = self.trees_of(model).filter(|(key, _)| key.ahead.is_none());
        trees.any(|(_, root)| self.entry_at(root, tokens).is_some())
    }

    /// The entries of a model's caches that `tokens` begin with, tree by tree.
    pub(super) fn find(&self, model: &str, tokens: &[u32]) -> Vec<Found> {
        let trees = self.trees_of(model).filter(|(key, _)| key.ahead.is_none());
        trees.map(|(_, root)| self.entries_along(root, tokens)).collect()
    }

    /// States of drafters that were told the first `len` tokens of a prompt and perhaps some more of it. What was used last
    /// comes first.
    pub(super) fn find_drafters(&self, model: &str, prompt: &[u32], len: usize) -> Vec<FoundDrafter> {
        let mut all = Vec::new();
        for (key, root) in self.trees_of(model) {
            let Some(ahead) = key.ahead else { continue };
            let told = len.checked_add(ahead).and_then(|end| prompt.get(..end));
            let Some(told) = told.filter(|told| self.entry_at(root, told).is_some()) else {
                continue;
            };
            let mut found = self.entries_along(root, told);
            if let Some(entry) = found.entries.pop() {
                all.push(FoundDrafter { found, entry, ahead });
            }
        }
        all.sort_by_key(|drafter| Reverse(drafter.entry.used));
        all
    }

    fn entries_along(&self, root: Id, tokens: &[u32]) -> Found {
        let mut found = Found {
            rows: Vec::new(),
            entries: Vec::new(),
        };
        for id in self.walk(root, tokens).path {
            let Some(node) = self.nodes.get(&id) else { break };
            found.rows.push(Arc::clone(&node.rows));
            if let Some(entry) = &node.entry {
                found.entries.push(FoundEntry {
                    id,
                    tokens: node.start + node.edge.len(),
                    depth: found.rows.len(),
                    held: entry.held.clone(),
                    used: entry.used,
                });
            }
        }
        found
    }

    /// Makes an entry the one used last, if it is still there.
    pub(super) fn touch(&mut self, id: Id) {
        let now = self.next();
        if let Some(entry) = self.nodes.get_mut(&id).and_then(|node| node.entry.as_mut()) {
            self.order.remove(&entry.used);
            entry.used = now;
            self.order.insert(now, id);
        }
    }

    pub(super) fn plan(&self, key: &Key, tokens: &[u32]) -> Plan {
        let place = self.roots.get(key).map(|root| self.walk(*root, tokens));
        let within = place.as_ref().and_then(|place| place.within);
        let split = within.and_then(|(id, agreed)| {
            let node = self.nodes.get(&id)?;
            Some((Arc::clone(&node.rows), node.start + agreed))
        });
        let tail = place.as_ref().map_or(0, Place::agreed);
        Plan {
            split,
            tail,
            lacks_rows: tail < tokens.len(),
            place,
        }
    }

    /// Makes an entry the one used last. False if there is none.
    pub(super) fn refresh(&mut self, key: &Key, tokens: &[u32]) -> bool {
        let known = self.roots.get(key).and_then(|root| self.entry_at(*root, tokens));
        if let Some(id) = known {
            self.touch(id);
        }
        known.is_some()
    }

    /// Puts what was cut in its place and makes room; or, where none is to be made, puts it only if there is room.
    pub(super) fn put(
        &mut self,
        key: &Key,
        tokens: &[u32],
        plan: &Plan,
        cut: Cut,
        held: Held,
        room: &mut Room,
    ) -> Outcome {
        if self.plan(key, tokens).place != plan.place {
            return Outcome::Stale;
        }
        if self.refresh(key, tokens) {
            return Outcome::Stored;
        }
        let rows = cut.tail.as_ref().map_or(0, |rows| rows.bytes());
        let tail = rows + bytes_of_tokens(tokens.len() - plan.tail);
        if !room.evict && self.bytes + tail + held.bytes() > room.budget {
            return Outcome::Full;
        }
        let id = self.grow(key, tokens, plan, cut);
        let used = self.next();
        let Some(node) = self.nodes.get_mut(&id) else {
            return Outcome::Stale;
        };
        let of_model = key.ahead.is_none();
        self.bytes += held.bytes();
        self.of_models += usize::from(of_model);
        self.order.insert(used, id);
        node.entry = Some(Entry { held, used, of_model });
        while self.bytes > room.budget {
            let Some((_, oldest)) = self.order.pop_first() else {
                break;
            };
            room.evicted += u64::from(self.remove(oldest));
        }
        Outcome::Stored
    }

    /// Makes the node that ends where `tokens` do, if there is none.
    fn grow(&mut self, key: &Key, tokens: &[u32], plan: &Plan, cut: Cut) -> Id {
        let mut above = match self.roots.get(key) {
            Some(root) => *root,
            None => {
                let root = self.next();
                self.roots.insert(Arc::new(key.clone()), root);
                root
            }
        };
        if let Some(place) = &plan.place {
            above = place.path.last().copied().unwrap_or(above);
            if let (Some((id, agreed)), Some(halves)) = (place.within, cut.split) {
                above = self.split(id, agreed, halves).unwrap_or(above);
            }
        }
        match cut.tail {
            Some(rows) => self.add(above, plan.tail, tokens[plan.tail..].to_vec(), rows),
            None => above,
        }
    }

    fn add(&mut self, parent: Id, start: usize, edge: Vec<u32>, rows: Arc<Snapshot>) -> Id {
        let id = self.next();
        let node = Node {
            parent,
            start,
            edge,
            rows,
            entry: None,
        };
        self.bytes += node.bytes();
        self.children.insert(node.place(), id);
        self.nodes.insert(id, node);
        id
    }

    /// Puts a node above another one, which keeps the rest of its edge.
    fn split(&mut self, id: Id, agreed: usize, [upper, lower]: [Arc<Snapshot>; 2]) -> Option<Id> {
        let node = self.nodes.get_mut(&id)?;
        let (parent, start) = (node.parent, node.start);
        self.bytes -= node.bytes();
        let rest = node.edge.split_off(agreed);
        let edge = std::mem::replace(&mut node.edge, rest);
        node.start += agreed;
        node.rows = lower;
        self.bytes += node.bytes();
        let above = self.add(parent, start, edge, upper);
        let node = self.nodes.get_mut(&id)?;
        node.parent = above;
        self.children.insert(node.place(), id);
        Some(above)
    }

    /// Takes an entry away, and the rows that no other one needs. True if it was of a model's own caches.
    fn remove(&mut self, mut id: Id) -> bool {
        let mut of_model = false;
        if let Some(entry) = self.nodes.get_mut(&id).and_then(|node| node.entry.take()) {
            self.bytes -= entry.held.bytes();
            self.of_models -= usize::from(entry.of_model);
            of_model = entry.of_model;
        }
        while self.nodes.get(&id).is_some_and(|node| node.entry.is_none()) && self.is_bare(id) {
            let Some(node) = self.nodes.remove(&id) else {
                break;
            };
            self.bytes -= node.bytes();
            self.children.remove(&node.place());
            id = node.parent;
        }
        if !self.nodes.contains_key(&id) && self.is_bare(id) {
            self.roots.retain(|_, root| *root != id);
        }
        of_model
    }

    /// Whether nothing is below a node.
    fn is_bare(&self, id: Id) -> bool {
        self.children.range((id, 0)..=(id, u32::MAX)).next().is_none()
    }

    /// Every node, each after its parent.
    pub(super) fn export(&self) -> Vec<Exported> {
        let mut all: Vec<Exported> = Vec::with_capacity(self.nodes.len());
        for (key, root) in &self.roots {
            let mut open: Vec<(Id, Vec<u32>)> = vec![(*root, Vec::new())];
            while let Some((above, text)) = open.pop() {
                for id in self
                    .children
                    .range((above, 0)..=(above, u32::MAX))
                    .map(|(_, id)| *id)
                {
                    let Some(node) = self.nodes.get(&id) else { continue };
                    let tokens = [text.as_slice(), &node.edge].concat();
                    all.push(Exported {
                        key: Arc::clone(key),
                        text: tokens.clone(),
                        rows: Arc::clone(&node.rows),
                        held: node.entry.as_ref().map(|entry| entry.held.clone()),
                    });
                    open.push((id, tokens));
                }
            }
        }
        all
    }
}
