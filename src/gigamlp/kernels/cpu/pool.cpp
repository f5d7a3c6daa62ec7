#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef _WIN32
#include <process.h>
#define getpid _getpid
#else
#include <unistd.h>
#endif

namespace gigamlp {
namespace {

struct Pool {
  const long process = (long)getpid();
  std::mutex in_use;  // held by the caller that has the pool's help
  std::mutex mutex;   // guards all below but `next`
  std::condition_variable wake, done;
  int workers = 0;
  uint64_t round = 0;   // counts the jobs
  int seats = 0;        // workers that may still join the job
  int busy = 0;         // workers that have joined and not left
  const std::function<void(int64_t, int64_t)>* work = nullptr;
  int64_t count = 0, grain = 0;
  std::atomic<int64_t> next{0};

  void take_parts() {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      (*work)(begin, begin + grain < count ? begin + grain : count);
    }
  }

  void live() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return round != seen && seats > 0; });
      seen = round;
      seats--;
      busy++;
      lock.unlock();
      take_parts();
      lock.lock();
      if (--busy == 0) done.notify_one();
    }
  }

  void grow(int wanted) {  // as many as the system gives; fewer are no error
    while (workers < wanted) {
      try {
        std::thread([this] { live(); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      workers++;
    }
  }
};

// Never deleted: workers sleep in it until the process ends. After a fork the child has none of the threads, and its
// copy of the locks may be held by one that is not there: it makes a pool of its own.
Pool* pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load(std::memory_order_acquire);
  if (found && found->process == (long)getpid()) return found;
  Pool* made = new Pool;
  if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made;
  delete made;
  return found;
}

}  // namespace

void parallel(int threads, int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  if (threads <= 1 || count <= grain) {
    work(0, count);
    return;
  }
  Pool& p = *pool();
  std::unique_lock<std::mutex> mine(p.in_use, std::try_to_lock);
  if (!mine.owns_lock()) {
    work(0, count);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(p.mutex);
    p.grow(threads - 1);
    p.work = &work;
    p.count = count;
    p.grain = grain;
    p.next.store(0, std::memory_order_relaxed);
    p.seats = threads - 1;
    p.round++;
  }
  p.wake.notify_all();
  p.take_parts();
  std::unique_lock<std::mutex> lock(p.mutex);
  p.seats = 0;  // who has not come by now need not come
  p.done.wait(lock, [&] { return p.busy == 0; });
}

}  // namespace gigamlp
