// Work by memory node, on a described machine of two nodes with a processor each: where threads stay, and with which
// indices they begin.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "pool.h"
#include "vishwamai/core/cpp/placement.h"

using namespace vishwamai;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "nodes: %s\n", what);
  std::exit(1);
}

int processors_of_this_thread() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof(set), &set);
  return CPU_COUNT(&set);
}

struct Seen {
  std::map<std::thread::id, std::pair<int64_t, int>> first;  // (index, node) of each thread
  std::set<int64_t> indices;
  bool helpers_stay = true;
};

// Every thread waits at its first index for all of them, so that nobody takes the share of another before it begins.
Seen run(Pool& pool, int count, int64_t n, Share share) {
  Seen seen;
  std::mutex mutex;
  std::atomic<int> begun{0};
  const std::thread::id caller = std::this_thread::get_id();
  parallel_for(pool.threads(count), n, [&](int64_t i) {
    bool fresh;
    {
      std::lock_guard<std::mutex> lock(mutex);
      fresh = seen.first.emplace(std::this_thread::get_id(), std::make_pair(i, current_node())).second;
      require(seen.indices.insert(i).second, "an index ran twice");
      if (std::this_thread::get_id() != caller && processors_of_this_thread() != 1) seen.helpers_stay = false;
    }
    if (!fresh) return;
    begun.fetch_add(1);
    for (int waits = 0; begun.load() < count && waits < 20000; ++waits) std::this_thread::sleep_for(std::chrono::microseconds(500));
  }, share);
  require(static_cast<int64_t>(seen.indices.size()) == n, "an index never ran");
  require(begun.load() == count, "a thread did not work");
  return seen;
}

}  // namespace

int main() {
  const int before = processors_of_this_thread();
  cpu_set_t first;
  CPU_ZERO(&first);
  CPU_SET(0, &first);
  {
    Pool pool(2);
    for (Share share : {Share::next, Share::runs}) run(pool, 3, 64, share);  // no nodes are known: as ever
    set_nodes({{0}, {1}});
    cpu_set_t everywhere;
    sched_getaffinity(0, sizeof(everywhere), &everywhere);
    sched_setaffinity(0, sizeof(first), &first);  // the caller works on node 0
    std::set<int> nodes;
    for (Share share : {Share::next, Share::runs}) {
      const Seen seen = run(pool, 3, 64, share);
      require(seen.helpers_stay, "a helper may leave its node");
      for (const auto& [thread, start] : seen.first) {
        nodes.insert(start.second);
        const bool lower = share == Share::next ? start.first < 32 : start.first < 22;  // runs: one of three to node 0
        require(lower == (start.second == 0), "a thread began with the indices of another node");
      }
    }
    require(nodes.size() == 2, "no thread worked on one of the nodes");
    sched_setaffinity(0, sizeof(everywhere), &everywhere);
  }
  {
    Pool pool(2);
    const Placed placed({0, 1});
    std::atomic<int> elsewhere{0};
    parallel_for(pool.threads(3), 64, [&](int64_t) { elsewhere += current_node() != 1; });
    require(elsewhere.load() == 0, "a call for one node worked on another");
    require(processors_of_this_thread() == before, "the caller was not put back");
  }
  {
    const Placed placed({1, kUnplaced});
    require(thread_limit() == 1, "a call's own limit does not count");
  }
  require(thread_limit() > 1, "a call's limit outlived it");
  std::puts("nodes: ok");
  return 0;
}
