// The threads of one call: a team that shares loops, each iteration taken by the next free thread.
//
// Its threads draw tickets, one per iteration, instead of sharing an OpenMP loop, so that the same code runs on POSIX
// threads under ThreadSanitizer, which does not know the barriers of OpenMP.
#pragma once
#include <stdint.h>

#ifdef MULTIHEAD_STD_THREADS
// ThreadSanitizer does not know the barriers of OpenMP; it knows those of POSIX threads.
#include <pthread.h>
#else
#include <omp.h>
#endif

namespace {

// The state that the threads of a team share.
struct TeamState {
  int64_t next_ticket = 0;  // of all loops together; a ticket is one iteration
#ifdef MULTIHEAD_STD_THREADS
  pthread_barrier_t barrier;
#endif
};

// One thread's view of its team.
class Team {
 public:
  Team(TeamState &state, int64_t thread, int64_t threads) : thread(thread), threads_(threads), state_(state) {}

  // Run body(i) for i = 0 .. count - 1, each on the next free thread; then wait for the other threads.
  // The result must not depend on which thread runs which iteration.
  template <class Body>
  void for_each(int64_t count, Body body) {
    if (threads_ == 1) {  // may also run inside the caller's parallel region, whose barrier is not ours
      for (int64_t i = 0; i < count; i++) body(i);
      return;
    }
    for (;;) {
      const int64_t i = __atomic_fetch_add(&state_.next_ticket, 1, __ATOMIC_RELAXED) - first_ticket_;
      if (i >= count) break;
      body(i);
    }
    first_ticket_ += count + threads_;  // every thread draws one ticket past the end
    wait();
  }

  const int64_t thread;  // index in the team

 private:
  void wait() {
#ifdef MULTIHEAD_STD_THREADS
    pthread_barrier_wait(&state_.barrier);
#else
#pragma omp barrier
#endif
  }

  const int64_t threads_;
  int64_t first_ticket_ = 0;  // of the current loop
  TeamState &state_;
};

#ifdef MULTIHEAD_STD_THREADS
template <class Body>
struct ThreadArguments {
  TeamState *state;
  const Body *body;
  int64_t thread, threads;
};

template <class Body>
void *thread_main(void *pointer) {
  auto *arguments = static_cast<ThreadArguments<Body> *>(pointer);
  Team team(*arguments->state, arguments->thread, arguments->threads);
  (*arguments->body)(team);
  return nullptr;
}
#endif

// How many of the threads of a call do some work: all, or one where the others would take longer to start. The work is in
// multiplications of a matrix product. A thread that has just worked starts again in about 2 us.
inline int64_t team_size(int64_t threads, double multiplications) {
  constexpr double PER_THREAD = 1 << 17, ENOUGH = 1 << 20;
  const double least = PER_THREAD * static_cast<double>(threads);
  return multiplications < (least < ENOUGH ? least : ENOUGH) || threads < 1 ? 1 : threads;
}

// Run body(team) on each of `threads` threads, or on fewer where the system has no more.
template <class Body>
void run_parallel(int64_t threads, const Body &body) {
  TeamState state;
#ifdef MULTIHEAD_STD_THREADS
  constexpr int64_t MAX_THREADS = 64;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  pthread_barrier_init(&state.barrier, nullptr, static_cast<unsigned>(threads));
  pthread_t handles[MAX_THREADS];
  ThreadArguments<Body> arguments[MAX_THREADS];
  for (int64_t i = 0; i < threads; i++) arguments[i] = {&state, &body, i, threads};
  for (int64_t i = 1; i < threads; i++) pthread_create(&handles[i], nullptr, thread_main<Body>, &arguments[i]);
  thread_main<Body>(&arguments[0]);
  for (int64_t i = 1; i < threads; i++) pthread_join(handles[i], nullptr);
  pthread_barrier_destroy(&state.barrier);
#else
  if (threads <= 1) {
    Team team(state, 0, 1);
    body(team);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    Team team(state, omp_get_thread_num(), omp_get_num_threads());
    body(team);
  }
#endif
}

}  // namespace
