// A pool of threads, made once for the process: it sleeps when there is nothing to do, and survives a fork.
#pragma once
#include <stdint.h>

#include <functional>

namespace gigamlp {

// Calls work(begin, end) for parts of [0, count) on up to `threads` threads, this one among them, and returns when all
// are done. Parts are multiples of `grain`, handed out as threads become free. A second caller at the same time gets
// no help and does all its parts itself.
void parallel(int threads, int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

}  // namespace gigamlp
