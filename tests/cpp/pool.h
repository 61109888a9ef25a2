// A small thread pool with the interface that XLA's has for us: tasks are taken in order by a fixed number of threads.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "vishwamai/core/cpp/parallel.h"

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    for (auto [run, task] : tasks_) run(task);  // what nobody took in time, long after its call has ended
  }

  vishwamai::Threads threads(int count) {
    vishwamai::Threads threads;
    threads.pool = this;
    threads.count = count;
    threads.schedule = [](void* pool, void (*run)(void*), void* task) {
      Pool* self = static_cast<Pool*>(pool);
      {
        std::lock_guard<std::mutex> lock(self->mutex_);
        self->tasks_.emplace_back(run, task);
      }
      self->ready_.notify_one();
    };
    return threads;
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto [run, task] = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      run(task);
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::pair<void (*)(void*), void*>> tasks_;
  std::vector<std::thread> threads_;
  bool closed_ = false;
};
