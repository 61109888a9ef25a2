// Where the threads of a call work: how many of them, and on the processors of which memory node.
#pragma once

#include <vector>

namespace vishwamai {

constexpr int kSpread = -1;      // over all memory nodes, each beginning with a share of the work of its own
constexpr int kUnplaced = -2;    // as the system schedules them

struct Placement {
  int threads = 0;  // at most; 0: as many as thread_limit() says
  int node = kSpread;  // or the only node whose processors work
};

// Of the calls that this thread makes.
Placement& placement();

// The processors of each memory node. Until this is called, and with fewer than two nodes, kSpread places nothing.
void set_nodes(std::vector<std::vector<int>> processors);

// The node that the calling thread runs on, 0 where that is not known; for tests.
int current_node();

// Puts another placement in force for the life of the object.
class Placed {
 public:
  explicit Placed(Placement next) : last_(placement()) { placement() = next; }
  ~Placed() { placement() = last_; }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

 private:
  Placement last_;
};

}  // namespace vishwamai
