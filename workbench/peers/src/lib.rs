//! The index structures of the `dynamo-kv-router` crate behind a C interface, so that one process
//! can give them and another index the same arrays, turn by turn.
//!
//! What is measured is the structure alone: events and hash lists are made before the clock starts,
//! and everything runs on one thread without a hop. Latencies are ticks of the processor's time
//! stamp counter taken around each call; throughput is CPU time of the thread that applies, since
//! machines are shared.
//!
//! Safety: the caller keeps to these rules, none is checked. One thread at a time for each index;
//! addresses are valid for as many items as are said.
#![allow(clippy::missing_safety_doc)]

use std::future::Future;
use std::pin::pin;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Barrier};
use std::task::{Context, Wake, Waker};

use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::nested_map::{LevelIndex, SearchMode};
use dynamo_kv_router::protocols::{
    compute_block_hash_for_seq, compute_seq_hash_for_block, BlockHashOptions,
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer, RadixTree};
use rustc_hash::FxHashMap;
use tokio::sync::oneshot;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("latencies are read from the time stamp counter of x86-64");

const STORED: u64 = 0;
const REMOVED: u64 = 1;
const JUMP_BLOCKS: usize = 32;

/// One thing to do. `kind`: 0 stored, 1 removed, 2 match. Its hashes are `blocks` ones from `start`
/// on, in columns that many operations share. A store at position 0 has no parent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Operation {
    kind: u64,
    worker: u64,
    position: u64,
    parent: u64,
    start: u64,
    blocks: u64,
}

/// The hashes of operations: those of blocks by themselves, and those that name blocks in events.
#[derive(Clone, Copy)]
struct Hashes {
    local: *const u64,
    chain: *const u64,
}

impl Operation {
    unsafe fn hashes(&self, of: Hashes) -> Vec<LocalBlockHash> {
        hashes_at(of.local.add(self.start as usize), self.blocks)
    }

    unsafe fn event(&self, of: Hashes, id: u64) -> RouterEvent {
        let names = slice::from_raw_parts(of.chain.add(self.start as usize), self.blocks as usize);
        let data = match self.kind {
            STORED => {
                let local =
                    slice::from_raw_parts(of.local.add(self.start as usize), self.blocks as usize);
                KvCacheEventData::Stored(KvCacheStoreData {
                    parent_hash: (self.position > 0)
                        .then_some(ExternalSequenceBlockHash(self.parent)),
                    start_position: None,
                    blocks: names
                        .iter()
                        .zip(local)
                        .map(|(&name, &tokens)| stored(name, tokens))
                        .collect(),
                })
            }
            REMOVED => KvCacheEventData::Removed(KvCacheRemoveData {
                block_hashes: names.iter().map(|&name| ExternalSequenceBlockHash(name)).collect(),
            }),
            kind => panic!("no event of kind {kind}"),
        };
        RouterEvent::new(self.worker, KvCacheEvent { event_id: id, data, dp_rank: 0 })
    }
}

fn stored(name: u64, tokens: u64) -> KvCacheStoredBlockData {
    KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(name),
        tokens_hash: LocalBlockHash(tokens),
        mm_extra_info: None,
    }
}

unsafe fn hashes_at(address: *const u64, count: u64) -> Vec<LocalBlockHash> {
    slice::from_raw_parts(address, count as usize)
        .iter()
        .map(|&hash| LocalBlockHash(hash))
        .collect()
}

enum Step {
    Event(RouterEvent),
    Match(Vec<LocalBlockHash>),
}

/// Where the ticks and the answer of one match go; either may be null.
#[derive(Clone, Copy)]
struct Outcome {
    ticks: *mut u64,
    answer: *mut u64,
}

// The caller waits until everything is written before it looks.
unsafe impl Send for Outcome {}
unsafe impl Sync for Outcome {}

impl Outcome {
    unsafe fn ticks(&self, ticks: u64) {
        if !self.ticks.is_null() {
            *self.ticks = ticks;
        }
    }

    /// A count, then `worker << 32 | blocks` for each worker that holds any.
    unsafe fn answer(&self, scores: &OverlapScores) {
        if self.answer.is_null() {
            return;
        }
        let mut count = 0;
        for (holder, &blocks) in scores.scores.iter().filter(|(_, &blocks)| blocks > 0) {
            count += 1;
            *self.answer.add(count) = holder.worker_id << 32 | u64::from(blocks);
        }
        *self.answer = count as u64;
    }
}

/// The concurrent tree keeps what it needs for removals inside its event loop. So that runs on a
/// thread of its own, which is held until its queue is full, and then works through it alone.
struct Concurrent {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
}

impl Concurrent {
    fn new() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, queue) = flume::unbounded();
        let served = tree.clone();
        std::thread::spawn(move || served.worker(queue, None));
        Self { tree, tasks }
    }

    /// CPU time of the event thread in ns.
    fn run(&self, steps: Vec<(Step, Outcome)>) -> u64 {
        let gate = Arc::new(Barrier::new(2));
        let began = Arc::new(AtomicU64::new(0));
        let (done, ended) = mpsc::channel();
        let mut waiting = Vec::new();
        let mut call = |work: Box<dyn Fn() + Send + Sync>| {
            let (task, answer) = called(work);
            waiting.push(answer);
            self.tasks.send(task).expect("the event thread runs");
        };
        let (held, start) = (gate.clone(), began.clone());
        call(Box::new(move || {
            held.wait();
            start.store(cpu_ns(), Ordering::SeqCst);
        }));
        for (step, outcome) in steps {
            match step {
                Step::Event(event) => {
                    self.tasks.send(WorkerTask::Event(event)).expect("the event thread runs")
                }
                Step::Match(hashes) => {
                    let tree = self.tree.clone();
                    call(Box::new(move || timed(outcome, || tree.find_matches(&hashes, false))));
                }
            }
        }
        call(Box::new(move || {
            let _ = done.send(cpu_ns());
        }));
        gate.wait();
        let until = ended.recv().expect("the event thread runs");
        until - began.load(Ordering::SeqCst)
    }
}

impl Drop for Concurrent {
    fn drop(&mut self) {
        let _ = self.tasks.send(WorkerTask::Terminate);
    }
}

struct Called(Box<dyn Fn() + Send + Sync>);

impl Wake for Called {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

/// A task that makes the event thread call something: its answer wakes a receiver, whose waker is
/// the call.
fn called(work: Box<dyn Fn() + Send + Sync>) -> (WorkerTask, oneshot::Receiver<()>) {
    let (answer, mut receiver) = oneshot::channel();
    let waker: Waker = Arc::new(Called(work)).into();
    let pending = pin!(&mut receiver).poll(&mut Context::from_waker(&waker)).is_pending();
    assert!(pending);
    (WorkerTask::Flush(answer), receiver)
}

/// Freeing the answer is part of a match, as it is for whoever asks; reading it is not.
fn timed(outcome: Outcome, find: impl FnOnce() -> OverlapScores) {
    let began = now();
    let scores = find();
    let found = now();
    unsafe { outcome.answer(&scores) };
    let read = now();
    drop(scores);
    unsafe { outcome.ticks(found - began + (now() - read)) };
}

enum Structure {
    Tree(RadixTree),
    Concurrent(Concurrent),
    Positional(PositionalIndexer, FxHashMap<WorkerWithDpRank, LevelIndex>),
}

impl Structure {
    /// A match on the thread that asks, as all of them allow it.
    fn find(&self, hashes: Vec<LocalBlockHash>, outcome: Outcome) {
        match self {
            Structure::Tree(tree) => timed(outcome, || tree.find_matches(hashes, false)),
            Structure::Concurrent(on) => timed(outcome, || on.tree.find_matches(&hashes, false)),
            Structure::Positional(index, _) => {
                timed(outcome, || index.find_matches(&hashes, false))
            }
        }
    }

    /// CPU time in ns of everything together, what it frees included.
    fn run(&mut self, steps: Vec<(Step, Outcome)>) -> u64 {
        if let Structure::Concurrent(on) = self {
            return on.run(steps);
        }
        let began = cpu_ns();
        for (step, outcome) in steps {
            match (step, &mut *self) {
                (Step::Match(hashes), _) => self.find(hashes, outcome),
                (Step::Event(event), Structure::Tree(tree)) => {
                    let _ = tree.apply_event(event);
                }
                (Step::Event(event), Structure::Positional(index, blocks)) => {
                    let _ = index.apply_event(blocks, event, None);
                }
                (Step::Event(_), Structure::Concurrent(_)) => unreachable!(),
            }
        }
        cpu_ns() - began
    }
}

/// An index, and the id of its next event.
pub struct Index {
    structure: Structure,
    next_event: u64,
}

/// `structure`: 0 RadixTree, 1 ConcurrentRadixTreeCompressed, 2 PositionalIndexer.
#[no_mangle]
pub extern "C" fn peer_new(structure: u64) -> *mut Index {
    let structure = match structure {
        0 => Structure::Tree(RadixTree::new()),
        1 => Structure::Concurrent(Concurrent::new()),
        2 => Structure::Positional(
            PositionalIndexer::new_with_mode(JUMP_BLOCKS, SearchMode::Strided),
            FxHashMap::default(),
        ),
        _ => return std::ptr::null_mut(),
    };
    Box::into_raw(Box::new(Index { structure, next_event: 0 }))
}

#[no_mangle]
pub unsafe extern "C" fn peer_free(index: *mut Index) {
    drop(Box::from_raw(index));
}

/// Do `count` operations in turn; the CPU time of that in ns. For operation i that is a match,
/// `ticks[i]` and the answer at `answers + i * stride` are written, where these are not null.
/// Matches alone run on this thread, each right after its hashes were written, as a router's are.
#[no_mangle]
pub unsafe extern "C" fn peer_run(
    index: *mut Index,
    operations: *const Operation,
    count: u64,
    local: *const u64,
    chain: *const u64,
    ticks: *mut u64,
    answers: *mut u64,
    stride: u64,
) -> u64 {
    let index = &mut *index;
    let operations = slice::from_raw_parts(operations, count as usize);
    let of = Hashes { local, chain };
    let outcome = |i: usize| Outcome {
        ticks: if ticks.is_null() { ticks } else { ticks.add(i) },
        answer: if answers.is_null() { answers } else { answers.add(i * stride as usize) },
    };
    if operations.iter().all(|operation| operation.kind > REMOVED) {
        let began = cpu_ns();
        for (i, operation) in operations.iter().enumerate() {
            index.structure.find(operation.hashes(of), outcome(i));
        }
        return cpu_ns() - began;
    }
    let mut steps = Vec::with_capacity(operations.len());
    for (i, operation) in operations.iter().enumerate() {
        let step = if operation.kind > REMOVED {
            Step::Match(operation.hashes(of))
        } else {
            index.next_event += 1;
            Step::Event(operation.event(of, index.next_event))
        };
        steps.push((step, outcome(i)));
    }
    index.structure.run(steps)
}

/// From tokens to scores: `prompts` prompts of `tokens_each` tokens, end to end.
#[no_mangle]
pub unsafe extern "C" fn peer_run_tokens(
    index: *mut Index,
    tokens: *const u32,
    tokens_each: u64,
    prompts: u64,
    block_size: u32,
    ticks: *mut u64,
) {
    for i in 0..prompts as usize {
        let prompt =
            slice::from_raw_parts(tokens.add(i * tokens_each as usize), tokens_each as usize);
        let began = now();
        let hashes = compute_block_hash_for_seq(prompt, block_size, BlockHashOptions::default());
        let hashed = now() - began;
        let nowhere = Outcome { ticks: ticks.add(i), answer: std::ptr::null_mut() };
        (*index).structure.find(hashes, nowhere);
        *ticks.add(i) += hashed;
    }
}

/// The local hashes of a prompt; how many.
#[no_mangle]
pub unsafe extern "C" fn peer_local_hashes(
    tokens: *const u32,
    count: u64,
    block_size: u32,
    local: *mut u64,
) -> u64 {
    let tokens = slice::from_raw_parts(tokens, count as usize);
    let hashes = compute_block_hash_for_seq(tokens, block_size, BlockHashOptions::default());
    for (i, hash) in hashes.iter().enumerate() {
        *local.add(i) = hash.0;
    }
    hashes.len() as u64
}

/// The chained hashes of `sequences` rows of `blocks` local hashes each.
#[no_mangle]
pub unsafe extern "C" fn peer_chain(
    local: *const u64,
    sequences: u64,
    blocks: u64,
    chain: *mut u64,
) {
    for row in 0..sequences as usize {
        let start = row * blocks as usize;
        let names = compute_seq_hash_for_block(&hashes_at(local.add(start), blocks));
        slice::from_raw_parts_mut(chain.add(start), blocks as usize).copy_from_slice(&names);
    }
}

fn now() -> u64 {
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// CPU time of this thread.
fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
