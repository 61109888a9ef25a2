#include "parallel.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "placement.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace vishwamai {
namespace {

// The memory nodes of this machine, never freed: a thread may still read one that was replaced.
struct Nodes {
  std::vector<std::vector<int>> processors;  // of each node
  std::vector<int> node_of;                  // of each processor, -1 for none
  std::vector<int> order;                    // nodes in the order in which threads are dealt out, one for a processor

  explicit Nodes(std::vector<std::vector<int>> each) : processors(std::move(each)) {
    size_t most = 0;
    for (size_t node = 0; node < processors.size(); ++node) {
      most = processors[node].size() > most ? processors[node].size() : most;
      for (int processor : processors[node]) {
        if (processor >= static_cast<int>(node_of.size())) node_of.resize(processor + 1, -1);
        node_of[processor] = static_cast<int>(node);
      }
    }
    for (size_t i = 0; i < most; ++i) {
      for (size_t node = 0; node < processors.size(); ++node) {
        if (i < processors[node].size()) order.push_back(static_cast<int>(node));
      }
    }
  }
  int64_t count() const { return static_cast<int64_t>(processors.size()); }
};

std::atomic<const Nodes*>& nodes() {
  static std::atomic<const Nodes*> machine{nullptr};
  return machine;
}

int node_here(const Nodes* machine) {
#if defined(__linux__)
  const int processor = sched_getcpu();
  if (machine && processor >= 0 && processor < static_cast<int>(machine->node_of.size()) && machine->node_of[processor] >= 0) {
    return machine->node_of[processor];
  }
#else
  (void)machine;
#endif
  return 0;
}

// The thread works on the processors of a node, as far as it may, for the life of the object; or from then on.
class OnNode {
 public:
#if defined(__linux__)
  OnNode(const Nodes* machine, int node, bool forever = false) : forever_(forever) {
    if (machine == nullptr || node < 0 || node >= machine->count()) return;
    if (sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    cpu_set_t some;
    CPU_ZERO(&some);
    for (int processor : machine->processors[node]) {
      if (processor < CPU_SETSIZE && CPU_ISSET(processor, &before_)) CPU_SET(processor, &some);
    }
    changed_ = CPU_COUNT(&some) > 0 && sched_setaffinity(0, sizeof(some), &some) == 0;
  }
  ~OnNode() {
    if (changed_ && !forever_) sched_setaffinity(0, sizeof(before_), &before_);
  }
#else
  OnNode(const Nodes*, int, bool = false) {}
  ~OnNode() {}
#endif
  OnNode(const OnNode&) = delete;
  OnNode& operator=(const OnNode&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t before_;
  bool changed_ = false, forever_;
#endif
};

// A helper of a spread call stays on the node that it is dealt at its first.
void settle(const Nodes* machine) {
  static std::atomic<uint32_t> next{0};
  static thread_local const Nodes* settled = nullptr;
  if (settled == machine) return;
  settled = machine;
  OnNode(machine, machine->order[next.fetch_add(1, std::memory_order_relaxed) % machine->order.size()], true);
}

struct alignas(64) Run {  // a cache line each: threads count without disturbing each other
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// Shared by the caller and its helpers; a helper that starts late finds no index left and never touches `body`.
struct Job {
  void (*body)(void*, int64_t);
  void* context;
  int64_t n;
  int64_t count;  // of runs
  std::unique_ptr<Run[]> runs;
  std::atomic<int64_t> arrived{0};  // of threads
  std::atomic<int64_t> done{0};
  Placement placed;
  const Nodes* spread;  // over these nodes, runs are divided in their order; null: no node has runs of its own
  const Nodes* bound;   // the nodes of `placed.node`, or null

  Job(void (*each)(void*, int64_t), void* with, int64_t indices, int64_t parts, Placement where, const Nodes* over,
      const Nodes* within)
      : body(each),
        context(with),
        n(indices),
        count(parts),
        runs(new Run[static_cast<size_t>(parts)]),
        placed(where),
        spread(over),
        bound(within) {
    for (int64_t r = 0; r < count; ++r) {
      runs[r].next.store(n / count * r + (r < n % count ? r : n % count), std::memory_order_relaxed);
      runs[r].end = n / count * (r + 1) + (r + 1 < n % count ? r + 1 : n % count);
    }
  }

  // Runs are shared by arrival, among those of the thread's node first.
  int64_t first_run() {
    const int64_t arrival = arrived.fetch_add(1, std::memory_order_relaxed);
    if (spread == nullptr) return arrival % count;
    const int64_t node = node_here(spread), begin = count * node / spread->count();
    const int64_t share = count * (node + 1) / spread->count() - begin;
    return begin + (share > 0 ? arrival % share : 0);
  }

  void work() {
    const Placed in_force(placed);
    const OnNode bound_here(bound, placed.node);
    const int64_t own = first_run();
    int64_t mine = 0;
    for (int64_t r = 0; r < count; ++r) {
      Run& run = runs[(own + r) % count];
      if (run.next.load(std::memory_order_relaxed) >= run.end) continue;
      for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end; ++mine) body(context, i);
    }
    if (mine != 0 && done.fetch_add(mine, std::memory_order_acq_rel) + mine == n) done.notify_all();
  }
};

void run_helper(void* task) {
  std::unique_ptr<std::shared_ptr<Job>> job(static_cast<std::shared_ptr<Job>*>(task));
  if ((*job)->spread) settle((*job)->spread);
  (*job)->work();
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

Placement& placement() {
  static thread_local Placement here;
  return here;
}

void set_nodes(std::vector<std::vector<int>> processors) { nodes().store(new Nodes(std::move(processors)), std::memory_order_release); }

int current_node() { return node_here(nodes().load(std::memory_order_acquire)); }

void run_parallel(const Threads& threads, int64_t n, Share share, void (*body)(void*, int64_t), void* context) {
  const Placement where = placement();
  const Nodes* machine = nodes().load(std::memory_order_acquire);
  const Nodes* spread = machine && where.node == kSpread && machine->count() > 1 ? machine : nullptr;
  const Nodes* bound = machine && where.node >= 0 && where.node < machine->count() ? machine : nullptr;
  int64_t most = threads.count;
  if (bound) {
    const auto size = static_cast<int64_t>(bound->processors[where.node].size());
    most = size >= 1 && size < most ? size : most;
  }
  const int64_t helpers = (n < most ? n : most) - 1;
  int64_t parts = share == Share::runs ? helpers + 1 : 1;
  if (spread && parts < spread->count()) parts = spread->count();
  const auto job = std::make_shared<Job>(body, context, n, parts, where, spread, bound);
  for (int64_t i = 0; i < helpers; ++i) threads.schedule(threads.pool, run_helper, new std::shared_ptr<Job>(job));
  job->work();
  // The last index of a helper is usually a few microseconds away: spin for about that long (a pause is some 140
  // cycles) before sleeping.
  int64_t done = job->done.load(std::memory_order_acquire);
  for (int spin = 0; done < n && spin < 256; ++spin) {
    pause();
    done = job->done.load(std::memory_order_acquire);
  }
  while (done < n) {
    job->done.wait(done, std::memory_order_acquire);
    done = job->done.load(std::memory_order_acquire);
  }
}

int thread_limit() {
  static const int limit = [] {
    for (const char* name : {"VISHWAMAI_CPU_THREADS", "OMP_NUM_THREADS"}) {  // OpenMP's may be a list, "4,2"
      const char* text = std::getenv(name);
      const int value = text ? std::atoi(text) : 0;
      if (value > 0) return value;
    }
    return 1 << 20;
  }();
  const int most = placement().threads;
  return most > 0 && most < limit ? most : limit;
}

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int kKept = 0;  // every Scratch its own allocation: an overrun is seen
#else
constexpr int kKept = 6;
#endif
constexpr size_t kKeptBytes = size_t{64} << 20;  // a larger block goes back to the system
constexpr size_t kHugePage = size_t{2} << 20;

struct Block {
  char* data = nullptr;
  size_t bytes = 0;
};

char* allocate(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return static_cast<char*>(data);
}

// The blocks that this thread has used and may use again.
struct Cache {
  Block blocks[kKept + 1];
  ~Cache() {
    for (Block& block : blocks) std::free(block.data);
  }
  // The smallest kept block of at least `bytes`, or an empty one.
  Block get(size_t bytes) {
    Block* best = nullptr;
    for (Block& block : blocks) {
      if (block.data && block.bytes >= bytes && (best == nullptr || block.bytes < best->bytes)) best = &block;
    }
    Block found;
    if (best) {
      found = *best;
      *best = Block();
    }
    return found;
  }
  // Keeps the larger blocks; true when `block` was taken over (or freed).
  void put(Block block) {
    Block* least = nullptr;
    for (int i = 0; i < kKept; ++i) {
      if (least == nullptr || blocks[i].bytes < least->bytes) least = &blocks[i];
    }
    if (least != nullptr && block.bytes <= kKeptBytes && block.bytes > least->bytes) {
      const Block old = *least;
      *least = block;
      block = old;
    }
    std::free(block.data);
  }
};

Cache& cache() {
  static thread_local Cache blocks;
  return blocks;
}

bool poisoned() {
  static const bool on = [] {
    const char* text = std::getenv("VISHWAMAI_CPU_POISON");
    return text != nullptr && *text == '1';
  }();
  return on;
}

}  // namespace

void expect_written(void* data, size_t bytes) {
#if defined(__linux__)
  if (bytes < 2 * kHugePage) return;
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: where there are none, nothing is lost
#else
  (void)data, (void)bytes;
#endif
}

void keep_freed_memory() {
#if defined(__GLIBC__)
  const char* text = std::getenv("VISHWAMAI_CPU_KEEP_FREED");
  if (text != nullptr && *text == '0') return;
  // Freeing the largest block that adapts glibc's thresholds takes them where any program with large arrays brings
  // them: blocks up to 32 MiB come from the heap, which is trimmed from twice that on. It is never touched, so it costs
  // two system calls; thresholds that the user has set (MALLOC_*, mallopt) do not adapt, so they stay as they are.
  void* volatile block = std::malloc((size_t{32} << 20) - (1 << 16));  // volatile: a compiler may drop the pair
  std::free(block);
#endif
}

Scratch::Scratch(size_t bytes) {
  // Powers of two above a page, so that calls of like size share blocks.
  size_t rounded = round(bytes ? bytes : 1);
  if (kKept > 0) {
    size_t power = 4096;
    while (power < rounded && power < kKeptBytes) power *= 2;
    if (power >= rounded) rounded = power;
  }
  Block block = cache().get(rounded);
  if (block.data == nullptr) block = Block{allocate(rounded), rounded};
  data_ = block.data;
  bytes_ = block.bytes;
  if (poisoned()) std::memset(data_, 0xff, bytes_);
}

Scratch::~Scratch() { cache().put(Block{data_, bytes_}); }

}  // namespace vishwamai
