// The threads of one call: they share loops whose parts they take in turn, and wait for each other behind each loop.
#pragma once
#include <stdint.h>

#ifdef MULTIHEAD_STD_THREADS
// ThreadSanitizer does not see how OpenMP's own threads wait for each other; it does see these.
#include <pthread.h>
#else
#include <omp.h>
#endif

namespace {

// What the members of a team share.
struct Tickets {
  int64_t drawn = 0;
#ifdef MULTIHEAD_STD_THREADS
  pthread_barrier_t barrier;
#endif
};

// One thread of a team.
class Team {
 public:
  Team(Tickets &tickets, int64_t member, int64_t members) : member(member), members_(members), tickets_(tickets) {}

  // Call part(i) for i = 0 .. count - 1, each on the first thread that is free; then wait for the others.
  // Which thread takes which part must not matter to what is computed.
  template <class Part>
  void each(int64_t count, Part part) {
    for (;;) {
      const int64_t ticket = __atomic_fetch_add(&tickets_.drawn, 1, __ATOMIC_RELAXED) - loop_;
      if (ticket >= count) break;
      part(ticket);
    }
    loop_ += count + members_;  // every member draws one ticket too many
    wait();
  }

  const int64_t member;

 private:
  void wait() {
    if (members_ == 1) return;  // alone, perhaps inside a parallel region of the caller's: its barrier is not ours
#ifdef MULTIHEAD_STD_THREADS
    pthread_barrier_wait(&tickets_.barrier);
#else
#pragma omp barrier
#endif
  }

  const int64_t members_;
  int64_t loop_ = 0;
  Tickets &tickets_;
};

#ifdef MULTIHEAD_STD_THREADS
template <class Body>
struct Member {
  Tickets *tickets;
  const Body *body;
  int64_t index, members;
};

template <class Body>
void *work(void *given) {
  auto *member = static_cast<Member<Body> *>(given);
  Team team(*member->tickets, member->index, member->members);
  (*member->body)(team);
  return nullptr;
}
#endif

// Run body(team) on each of `threads` threads; where no more can be had, on fewer.
template <class Body>
void parallel(int64_t threads, const Body &body) {
  Tickets tickets;
#ifdef MULTIHEAD_STD_THREADS
  constexpr int64_t MOST = 64;
  if (threads > MOST) threads = MOST;
  pthread_barrier_init(&tickets.barrier, nullptr, static_cast<unsigned>(threads));
  pthread_t handles[MOST];
  Member<Body> members[MOST];
  for (int64_t i = 0; i < threads; i++) members[i] = {&tickets, &body, i, threads};
  for (int64_t i = 1; i < threads; i++) pthread_create(&handles[i], nullptr, work<Body>, &members[i]);
  work<Body>(&members[0]);
  for (int64_t i = 1; i < threads; i++) pthread_join(handles[i], nullptr);
  pthread_barrier_destroy(&tickets.barrier);
#else
  if (threads <= 1) {
    Team team(tickets, 0, 1);
    body(team);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    Team team(tickets, omp_get_thread_num(), omp_get_num_threads());
    body(team);
  }
#endif
}

}  // namespace
