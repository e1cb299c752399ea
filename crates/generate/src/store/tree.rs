//! What is stored, by its tokens: the part of the store that its lock guards. Nothing here copies an array.
//!
//! One tree for each model and shape of snapshot. A node holds the rows of the tokens on its edge; where a prompt was put it
//! is an *entry* and also holds what belongs to its last token alone. Rows stay as long as an entry at or below them needs
//! them.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;

use recant_core::Snapshot;

use super::DrafterState;

/// Never used twice, so an id tells whether a node is still the one that was seen.
type Id = u64;

/// What must agree for rows to be shared: the model, and the kinds, settings, arrays and devices of its caches.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) model: String,
    pub(super) shape: String,
}

impl Key {
    pub(super) fn new(model: &str, caches: &Snapshot) -> Self {
        let mut shape = String::new();
        describe(caches, &mut shape);
        Self {
            model: model.to_owned(),
            shape,
        }
    }
}

/// Writes down what does not depend on the number of tokens.
fn describe(snapshot: &Snapshot, out: &mut String) {
    // Writing to a string does not fail.
    let _ = write!(out, "{:?}{:?}(", snapshot.kind(), snapshot.settings());
    for (name, array) in snapshot.arrays() {
        let _ = write!(
            out,
            "{name:?} {:?} {:?}",
            array.dtype(),
            array.device().location()
        );
        if snapshot.row_names().contains(name) {
            let _ = write!(out, " rows of {:?}", array.dims().get(1..));
        }
        out.push(';');
    }
    for part in snapshot.parts() {
        describe(part, out);
    }
    out.push(')');
}

/// What an entry holds beside rows.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) caches: Arc<Snapshot>,
    pub(super) drafter: Option<Arc<DrafterState>>,
}

impl Held {
    /// Whether it lacks nothing of a drafter's state that is offered. One of another drafter, or that was told another next
    /// token, is something new.
    fn has(&self, drafter: Option<&DrafterState>) -> bool {
        match (self.drafter.as_deref(), drafter) {
            (_, None) => true,
            (None, Some(_)) => false,
            (Some(old), Some(new)) => old.serves_as(new),
        }
    }

    /// The same with a drafter's state, if there is something new in it.
    fn with(mut self, drafter: Option<Arc<DrafterState>>) -> Self {
        if !self.has(drafter.as_deref()) {
            self.drafter = drafter;
        }
        self
    }

    pub(super) fn bytes(&self) -> usize {
        self.caches.bytes() + self.drafter.as_ref().map_or(0, |drafter| drafter.bytes())
    }
}

struct Entry {
    held: Held,
    used: u64,
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
    /// The first token whose rows the tree lacks.
    pub(super) tail: usize,
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
}

/// One node, as it is written to files.
pub(super) struct Exported {
    pub(super) key: Arc<Key>,
    pub(super) tokens: Vec<u32>,
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
    /// Ids given and uses counted so far.
    serial: u64,
    bytes: usize,
}

impl Forest {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn entries(&self) -> usize {
        self.order.len()
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

    fn roots_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = Id> + 'a {
        let of_model = self.roots.iter().filter(move |(key, _)| key.model == model);
        of_model.map(|(_, root)| *root)
    }

    /// The node that ends where `tokens` do.
    fn node_at(&self, root: Id, tokens: &[u32]) -> Option<Id> {
        let place = self.walk(root, tokens);
        place.path.last().copied().filter(|_| place.end == tokens.len())
    }

    pub(super) fn contains(&self, model: &str, tokens: &[u32]) -> bool {
        self.roots_of(model).any(|root| {
            let node = self.node_at(root, tokens).and_then(|id| self.nodes.get(&id));
            node.is_some_and(|node| node.entry.is_some())
        })
    }

    /// The entries that `tokens` begin with, tree by tree.
    pub(super) fn find(&self, model: &str, tokens: &[u32]) -> Vec<Found> {
        let mut all = Vec::new();
        for root in self.roots_of(model) {
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
                    });
                }
            }
            all.push(found);
        }
        all
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
        Plan {
            split,
            tail: place.as_ref().map_or(0, Place::agreed),
            place,
        }
    }

    /// Makes an entry that lacks nothing of what is offered the one used last. False where something is to be put.
    pub(super) fn refresh(&mut self, key: &Key, tokens: &[u32], drafter: Option<&DrafterState>) -> bool {
        let node = self.roots.get(key).and_then(|root| self.node_at(*root, tokens));
        let known = node.filter(|id| {
            let entry = self.nodes.get(id).and_then(|node| node.entry.as_ref());
            entry.is_some_and(|entry| entry.held.has(drafter))
        });
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
        mut held: Held,
        room: &mut Room,
    ) -> Outcome {
        if self.plan(key, tokens).place != plan.place {
            return Outcome::Stale;
        }
        let known = self.roots.get(key).and_then(|root| self.node_at(*root, tokens));
        let entry = known.and_then(|id| self.nodes.get(&id)?.entry.as_ref());
        let before = entry.map_or(0, |entry| entry.held.bytes());
        if let Some(entry) = entry {
            held = entry.held.clone().with(held.drafter);
        }
        let rows =
            cut.tail.as_ref().map_or(0, |rows| rows.bytes()) + bytes_of_tokens(tokens.len() - plan.tail);
        if !room.evict && self.bytes + rows + held.bytes() > room.budget + before {
            return Outcome::Full;
        }
        let id = match known {
            Some(id) => id,
            None => self.grow(key, tokens, plan, cut),
        };
        let now = self.next();
        let Some(node) = self.nodes.get_mut(&id) else {
            return Outcome::Stale;
        };
        self.bytes = self.bytes + held.bytes() - before;
        if let Some(old) = node.entry.replace(Entry { held, used: now }) {
            self.order.remove(&old.used);
        }
        self.order.insert(now, id);
        while self.bytes > room.budget {
            let Some((_, oldest)) = self.order.pop_first() else {
                break;
            };
            self.remove(oldest);
            room.evicted += 1;
        }
        Outcome::Stored
    }

    /// Makes the node that ends where `tokens` do.
    fn grow(&mut self, key: &Key, tokens: &[u32], plan: &Plan, cut: Cut) -> Id {
        let mut above = match (
            plan.place.as_ref().and_then(|place| place.path.last()),
            self.roots.get(key),
        ) {
            (Some(id), _) | (None, Some(id)) => *id,
            (None, None) => {
                let root = self.next();
                self.roots.insert(Arc::new(key.clone()), root);
                root
            }
        };
        let within = plan.place.as_ref().and_then(|place| place.within);
        if let (Some((id, agreed)), Some(halves)) = (within, cut.split) {
            above = self.split(id, agreed, halves).unwrap_or(above);
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

    /// Takes an entry away, and the rows that no other one needs.
    fn remove(&mut self, mut id: Id) {
        if let Some(entry) = self.nodes.get_mut(&id).and_then(|node| node.entry.take()) {
            self.bytes -= entry.held.bytes();
        }
        while self.nodes.get(&id).is_some_and(|node| node.entry.is_none()) && self.is_bare(id) {
            let Some(node) = self.nodes.remove(&id) else {
                return;
            };
            self.bytes -= node.bytes();
            self.children.remove(&node.place());
            id = node.parent;
        }
        if !self.nodes.contains_key(&id) && self.is_bare(id) {
            self.roots.retain(|_, root| *root != id);
        }
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
                        tokens: tokens.clone(),
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
