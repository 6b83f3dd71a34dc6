// See plane.h. Here is who waits for whom; the loops over data are in data.cpp.

#include "cpu/plane.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <poll.h>
#include <sched.h>
#include <utility>

namespace spmd {

namespace {

constexpr std::int64_t kHeader = 4096;
constexpr std::int64_t kSlots = 4, kMailboxes = 3;
constexpr std::int64_t kSpin = 3000, kSpinCrowded = 30;  // polls before a wait gives its core away
constexpr std::int64_t kPolls = 64;                     // and before it pauses between polls: pauses are long
constexpr std::int64_t kStores = 64 * kLine;            // what a core's store buffer takes without delay
constexpr std::int64_t kYieldNs = 20'000'000;           // and before it sleeps between polls
constexpr long kNapNs = 50'000;

// A seeded fault for the checker of data races: flags that do not release what was written before them.
#if defined(SPMD_FAULT_RELAXED)
constexpr int kPublish = __ATOMIC_RELAXED;
#else
constexpr int kPublish = __ATOMIC_RELEASE;
#endif

inline std::uint64_t load_word(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
inline void store_word(std::uint64_t& word, std::uint64_t value, int order = kPublish) {
    __atomic_store_n(&word, value, order);
}
inline std::uint64_t stamp(std::uint32_t number, std::uint32_t hash) { return std::uint64_t{number} << 32 | hash; }
inline std::int32_t ahead(std::uint64_t word, std::uint32_t number) {  // numbers wrap
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(word >> 32) - number);
}
inline std::uint32_t hash_of(std::uint64_t x) {
    x *= 0x9e3779b97f4a7c15ull;
    return static_cast<std::uint32_t>(x >> 32 ^ x);
}
inline std::int64_t size_of(int dtype) { return dtype == kFloat32 ? 4 : dtype == kBytes ? 1 : 2; }
inline std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

Plane::Plane(int rank, const std::vector<std::uintptr_t>& regions, const std::vector<int>& processes,
             std::int64_t mailbox_bytes, std::int64_t slot_bytes, bool crowded)
    : rank_(rank), size_(static_cast<int>(regions.size())), regions_(regions), processes_(processes),
      mailbox_bytes_(round_up(mailbox_bytes, kLine) + kLine), slot_bytes_(round_up(slot_bytes, kLine)), crowded_(crowded) {
    everyone_.pieces.resize(1);
    for (int r = 0; r < size_; ++r) everyone_.pieces[0].sources.push_back(r);
    data_kernels().clear(mailbox(rank_, 0), kMailboxes * mailbox_bytes_);
}

std::int64_t Plane::region_bytes(std::int64_t mailbox_bytes, std::int64_t slot_bytes) {
    return kHeader + kMailboxes * (round_up(mailbox_bytes, kLine) + kLine) + kSlots * round_up(slot_bytes, kLine);
}

char* Plane::mailbox(int rank, std::uint32_t which) const {
    return reinterpret_cast<char*>(regions_[rank]) + kHeader + which % kMailboxes * mailbox_bytes_;
}
char* Plane::slot(int rank, std::uint32_t pass) const {
    return mailbox(rank, 0) + kMailboxes * mailbox_bytes_ + pass % kSlots * slot_bytes_;
}

float* Plane::scratch(std::int64_t floats) {
    if (static_cast<std::int64_t>(scratch_.size()) < floats) scratch_.resize(floats);
    return scratch_.data();
}

// ------------------------------------------------------------------------------------------------------------ symmetric

void Plane::add_region(int id, const std::vector<std::uintptr_t>& addresses, std::int64_t bytes, bool lent) {
    shared_.push_back({id, addresses, bytes, lent, call_ - 1});
}

void Plane::remove_region(int id) {
    std::erase_if(shared_, [id](const Shared& shared) { return shared.id == id; });
}

Plane::Shared* Plane::find(const void* address) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    for (Shared& shared : shared_)
        if (at - shared.addresses[rank_] < static_cast<std::uintptr_t>(shared.bytes)) return &shared;
    return nullptr;
}

int Plane::ready(int id) {
    for (const Shared& shared : shared_)
        if (shared.id == id && shared.read_in == call_) return barrier();
    return broken_;
}

// ----------------------------------------------------------------------------------------------------------------- waits

int Plane::fail(int status, int peer) {
    if (broken_ == kDone) {
        broken_ = status, odd = peer;
        // who gives up because another did passes its reason on
        const std::uint64_t own = stamp(call_, static_cast<std::uint32_t>(peer) << 8 | (1 + status));
        store_word(mine().gave_up, status == kGivenUp ? load_word(words(peer).gave_up) : own);
    }
    return broken_;
}

// A wait for one peer: polls so far, when the polls became slow, and what was then found out.
struct Plane::Patience {
    std::int64_t turn = 0, since = 0;
    int verdict = kDone, about = -1;
};

// Whether a peer has made this call with other arguments.
inline bool Plane::differs(const Words& theirs) const {
    const std::uint64_t call = load_word(theirs.call[call_ & 1]);
    return ahead(call, call_) == 0 && static_cast<std::uint32_t>(call) != hash_;
}

// What has become of the peer? kDone: nothing is known, go on.
int Plane::ask_about(int peer, Patience& patience) {
    const std::int64_t now = monotonic_ns(), turn = patience.turn++;
    if (patience.since == 0) patience.since = now;
    patience.about = peer;
    if (turn % 16 == 0) {
        if (differs(words(peer))) return kDiffers;
        for (int other = 0; other < size_; ++other)
            if (load_word(words(other).gave_up)) return patience.about = other, kGivenUp;
    }
    if (turn % 64 == 0) {
        pollfd watched{processes_[peer], POLLIN, 0};
        if (processes_[peer] >= 0 && poll(&watched, 1, 0) == 1) return kDead;
        if (now - patience.since > timeout_s * 1e9) return kLate;
        if (idle && !idle()) return kInterrupted;
    }
    if (now - patience.since < kYieldNs) {
        sched_yield();
    } else {
        timespec nap{0, kNapNs};
        nanosleep(&nap, nullptr);
    }
    return kDone;
}

// One turn of a wait; false: it is over. After a bad verdict the caller looks once more: the peer may have come, and
// gone on, between its last look and the verdict.
__attribute__((noinline)) bool Plane::patient(int peer, Patience& patience) {
    if (patience.verdict != kDone) {
        fail(patience.verdict, patience.about);
        return false;
    }
    patience.verdict = ask_about(peer, patience);
    return true;
}

// ready() says whether the peer has come: 1 yes, 0 not yet, -1 with another call.
template <class Ready>
inline int Plane::wait(int peer, Ready ready) {
    Patience patience;
    const std::int64_t spins = crowded_ ? kSpinCrowded : kSpin, first = spins - kPolls;
    for (std::int64_t spin = spins;; --spin) {
        const int state = ready();
        if (__builtin_expect(state > 0, 1)) return kDone;
        if (state < 0) return fail(kDiffers, peer);
        if (spin <= 0) {
            if (!patient(peer, patience)) return broken_;
        } else if (spin < first) {
            cpu_pause();
        }
    }
}

// Every rank but me has published `pass` of this call.
inline int Plane::wait_arrived(std::uint32_t pass) {
    const std::uint64_t expected = stamp(pass, hash_);
    for (int k = 1; k < size_; ++k) {
        const int peer = rank_ + k < size_ ? rank_ + k : rank_ + k - size_;
        const Words& theirs = words(peer);
        const int status = wait(peer, [&] {
            const std::uint64_t word = load_word(theirs.arrive);
            if (__builtin_expect(word == expected, 1)) return 1;
            const std::int32_t by = ahead(word, pass);
            if (by == 0) return -1;
            if (by < 0) return 0;
            // further than this pass: in a later call (then it has seen that mine is the same), or in this one
            return differs(theirs) ? -1 : 1;
        });
        if (status) return status;
    }
    return kDone;
}

inline int Plane::wait_done(std::uint32_t pass) {
    for (int k = 1; k < size_; ++k) {
        const int peer = rank_ + k < size_ ? rank_ + k : rank_ + k - size_;
        const Words& theirs = words(peer);
        if (const int status = wait(peer, [&] { return ahead(load_word(theirs.done), pass) >= 0 ? 1 : 0; }))
            return status;
    }
    return kDone;
}

// ----------------------------------------------------------------------------------------------------------------- calls

// Adds a finished call to the totals.
struct Plane::Timer {
    Plane& plane;
    Op op;
    std::int64_t bytes, start = monotonic_ns();
    ~Timer() {
        const std::int64_t end = monotonic_ns();
        Total& total = plane.totals[op];
        ++total.calls, total.bytes += bytes, total.ns += end - start;
        if (plane.timeline) plane.events.push_back({op, bytes, start, end});
    }
};

int Plane::begin(Op op, std::int64_t bytes, int dtype, std::uint64_t signature) {
    if (broken_) return broken_;
    const std::uint64_t what = std::uint64_t(op) << 56 | std::uint64_t(dtype) << 48 | std::uint64_t(bytes);
    hash_ = hash_of(what ^ signature * 0xff51afd7ed558ccdull);
    ++call_;
    store_word(mine().what[call_ & 1], what, __ATOMIC_RELAXED);
    store_word(mine().call[call_ & 1], stamp(call_, hash_), __ATOMIC_RELEASE);
    return kDone;
}

inline void Plane::arrive() { store_word(mine().arrive, stamp(++pass_, hash_)); }

int Plane::barrier() {
    const Timer timer{*this, kBarrier, 0};
    if (const int status = begin(kBarrier, 0, 0, 0)) return status;
    arrive();
    return wait_arrived(pass_);
}

// Whether results go to the region that the rows lie in, other than sums in place.
bool Plane::overwrites(const Rows& rows, const Shared& shared) const {
    auto inside = [&](const void* p) {
        return p && reinterpret_cast<std::uintptr_t>(p) - shared.addresses[rank_] < static_cast<std::uintptr_t>(shared.bytes);
    };
    if (!rows.e) return rows.out != rows.in && inside(rows.out);
    return inside(rows.e->out) || inside(rows.e->residual_out) || inside(rows.e->quant_out) || inside(rows.e->scale_out);
}

int Plane::all_reduce(Algorithm ordinary, Algorithm symmetric, const Rows& rows, std::int64_t count) {
    if (broken_) return broken_;
    const std::int64_t bytes = count * rows.n * size_of(rows.dtype);
    const Timer timer{*this, kAllReduce, bytes};
    Shared* shared = symmetric == kCopied ? nullptr : find(rows.in);
    if (shared && overwrites(rows, *shared)) shared = nullptr;  // peers may still read what would be written
    const Algorithm algorithm = shared ? symmetric : ordinary;
    const std::int64_t row_bytes = rows.n * size_of(rows.dtype);
    if (algorithm == kLamport ? bytes > mailbox_bytes() : !shared && row_bytes > slot_bytes_) return kTooLong;
    std::uint64_t signature = algorithm;
    if (shared && rows.out == rows.in && !rows.e) signature |= 16;  // in place: another protocol
    if (shared) signature |= (reinterpret_cast<std::uintptr_t>(rows.in) - shared->addresses[rank_]) << 8 |
                             std::uint64_t(shared->id + 1) << 48;
    if (const int status = begin(kAllReduce, bytes, rows.dtype, signature)) return status;
    if (bytes == 0) {  // nothing to sum, and everybody comes
        arrive();
        return wait_arrived(pass_);
    }
    if (algorithm == kLamport) return lamport(rows, count);
    const bool fits = slot_bytes_ >= scaled_bytes(rows.n);  // else the slots are too small for it: one-shot
    if (algorithm == kLowPrecision && fits) return low_precision(rows, count);
    if (shared && rows.out == rows.in && !rows.e) return in_place(rows, count, *shared);
    if (algorithm == kTwoShot) return two_shot(rows, count, shared);
    everyone_.rows = everyone_.max_rows = everyone_.pieces[0].rows = count;
    return pass_rows(everyone_, rows, shared);
}

int Plane::exchange(Op op, const RowMap& map, const Rows& rows, std::uint64_t signature) {
    const std::int64_t bytes = map.rows * rows.n * size_of(rows.dtype);
    if (!broken_ && rows.n * size_of(rows.dtype) > slot_bytes_) return kTooLong;
    const Timer timer{*this, op, bytes};
    // ranks may hand in different row counts: the largest is what all know
    if (const int status = begin(op, map.max_rows * rows.n * size_of(rows.dtype), rows.dtype, signature)) return status;
    return pass_rows(map, rows, nullptr);
}

// Rows whose sources' addresses are in[0 .. count) to their place here.
inline void Plane::sum_rows(const Rows& rows, std::int64_t out_row, const void* const* in, int count,
                            std::int64_t n_rows, bool stream) {
    const DataKernels& data = data_kernels();
    if (rows.e) {
        data.finish(*rows.e, out_row, in, count, n_rows, scratch(rows.n));
        return;
    }
    const std::int64_t row_bytes = rows.n * size_of(rows.dtype);
    char* out = static_cast<char*>(rows.out) + out_row * row_bytes;
    if (count > 1)
        data.sum(out, in, count, n_rows * rows.n, rows.dtype, stream);
    else if (out != in[0])
        data.copy(out, in[0], n_rows * row_bytes, stream);
}

// The one-shot family. shared: everybody's rows lie in symmetric memory already.
int Plane::pass_rows(const RowMap& map, const Rows& rows, Shared* shared) {
    const DataKernels& data = data_kernels();
    const std::int64_t row_bytes = rows.n * size_of(rows.dtype), total = map.max_rows * row_bytes;
    const char* in = static_cast<const char*>(rows.in);
    const std::int64_t offset = shared ? reinterpret_cast<std::uintptr_t>(in) - shared->addresses[rank_] : 0;
    std::int64_t chunk = map.max_rows;  // rows of a pass
    if (!shared && total > std::min(chunk_bytes, slot_bytes_)) {
        const std::int64_t bytes = std::min(total < stream_bytes ? chunk_bytes : stream_chunk_bytes, slot_bytes_);
        chunk = std::max<std::int64_t>(bytes / row_bytes, 1);
    }
    const std::int64_t passes = chunk > 0 ? (map.max_rows + chunk - 1) / chunk : 1;
    const bool stream = total >= stream_bytes && rows.out != rows.in;
    const std::uint32_t first = pass_ + 1;

    auto publish = [&](std::int64_t k) {
        const std::int64_t from = k * chunk, to = std::min(from + chunk, map.rows);
        if (!shared && from < to) {
            if (rows.fold)
                data.add(slot(rank_, pass_ + 1), in + from * row_bytes,
                         static_cast<const char*>(rows.fold) + from * row_bytes, (to - from) * rows.n, rows.dtype);
            else
                data.copy(slot(rank_, pass_ + 1), in + from * row_bytes, (to - from) * row_bytes, false);
        }
        arrive();
    };
    publish(0);
    for (std::int64_t k = 0; k < passes; ++k) {
        if (k + 1 < passes) publish(k + 1);
        const auto pass = static_cast<std::uint32_t>(first + k);
        if (const int status = wait_arrived(pass)) return status;
        for (const Piece& piece : map.pieces) {
            const std::int64_t from = std::max(piece.at, k * chunk),
                               to = std::min(piece.at + piece.rows, (k + 1) * chunk);
            if (from >= to) continue;
            const void* sources[kMaxRanks];
            int count = 0;
            for (const int source : piece.sources)
                sources[count++] = source == rank_ && !rows.fold ? in + from * row_bytes
                                   : shared ? reinterpret_cast<const char*>(shared->addresses[source]) + offset +
                                                  from * row_bytes
                                            : slot(source, pass) + (from - k * chunk) * row_bytes;
            sum_rows(rows, piece.out + from - piece.at, sources, count, to - from, stream);
        }
    }
    if (!shared) return kDone;
    if (shared->lent) {
        shared->read_in = call_;
        return kDone;
    }
    store_word(mine().done, stamp(pass_, 0));
    return wait_done(pass_);
}

void Plane::publish() {
    if (!broken_) arrive();
}

int Plane::start(std::int64_t bytes, int dtype, std::uintptr_t in) {
    if (broken_) return broken_;
    const Timer timer{*this, kAllReduce, bytes};
    Shared* shared = find(reinterpret_cast<const void*>(in));
    const std::uint64_t signature = 1ull << 63 | (in - shared->addresses[rank_]) << 8 | std::uint64_t(shared->id + 1) << 40;
    started_ = pass_;
    const int status = begin(kAllReduce, bytes, dtype, signature);
    shared->read_in = call_;
    return status;
}

// Rows [first, first + count) of the tensors that `rows` names.
int Plane::complete(std::uint32_t part, const Rows& rows, std::int64_t first, std::int64_t count) {
    if (broken_) return broken_;
    const Shared& shared = *find(rows.in);
    const std::int64_t at = first * rows.n * size_of(rows.dtype);
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(rows.in) - shared.addresses[rank_] + at;
    if (const int status = wait_arrived(started_ + 1 + part)) return status;
    const void* sources[kMaxRanks];
    for (int source = 0; source < size_; ++source)
        sources[source] = reinterpret_cast<const void*>(shared.addresses[source] + offset);
    sum_rows(rows, first, sources, size_, count, false);
    return kDone;
}

// Source: the reduce-scatter + all-gather form of Thakur, Rabenseifner and Gropp, 2005, through shared slots.
int Plane::two_shot(const Rows& rows, std::int64_t count, Shared* shared) {
    const DataKernels& data = data_kernels();
    const std::int64_t row_bytes = rows.n * size_of(rows.dtype);
    const char* in = static_cast<const char*>(rows.in);
    const std::int64_t offset = shared ? reinterpret_cast<std::uintptr_t>(in) - shared->addresses[rank_] : 0;
    const std::int64_t chunk = std::max<std::int64_t>(std::min(slot_bytes_ / row_bytes, count), 1);
    const bool stream = count * row_bytes >= stream_bytes && rows.out != rows.in;
    const std::int64_t line = rows.e ? 1 : kLine / row_bytes ? kLine / row_bytes : 1;  // parts begin on lines
    for (std::int64_t from = 0; from < count || from == 0; from += chunk) {
        const std::int64_t n = std::min(chunk, count - from);
        if (!shared) data.copy(slot(rank_, pass_ + 1), in + from * row_bytes, n * row_bytes, false);
        arrive();
        if (const int status = wait_arrived(pass_)) return status;
        auto part = [&](int r) { return std::min(round_up(n * r / size_, line), n); };
        const std::int64_t begin = part(rank_), end = part(rank_ + 1);
        const void* sources[kMaxRanks];
        for (int source = 0; source < size_; ++source)
            sources[source] = source == rank_ ? in + (from + begin) * row_bytes
                              : shared ? reinterpret_cast<const char*>(shared->addresses[source]) + offset +
                                             (from + begin) * row_bytes
                                       : slot(source, pass_) + begin * row_bytes;
        char* sum = slot(rank_, pass_) + begin * row_bytes;  // nobody else reads this part of my slot
        data.sum(sum, sources, size_, (end - begin) * rows.n, rows.dtype, false);
        store_word(mine().done, stamp(pass_, 0));
        if (begin < end) {
            const void* own = sum;
            sum_rows(rows, from + begin, &own, 1, end - begin, stream);
        }
        for (int k = 1; k < size_; ++k) {
            const int peer = rank_ + k < size_ ? rank_ + k : rank_ + k - size_;
            const Words& theirs = words(peer);
            if (const int status = wait(peer, [&] { return ahead(load_word(theirs.done), pass_) >= 0 ? 1 : 0; }))
                return status;
            const std::int64_t their_begin = part(peer), their_end = part(peer + 1);
            const void* summed = slot(peer, pass_) + their_begin * row_bytes;
            if (their_begin < their_end) sum_rows(rows, from + their_begin, &summed, 1, their_end - their_begin, stream);
        }
    }
    return kDone;  // every read of symmetric memory ended before its reader's `done`
}

// Zero copy: everybody sums its part of what lies in symmetric memory and writes the sum to all.
int Plane::in_place(const Rows& rows, std::int64_t count, Shared& shared) {
    const DataKernels& data = data_kernels();
    const std::int64_t n = count * rows.n, size = size_of(rows.dtype);
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(rows.in) - shared.addresses[rank_];
    auto part = [&](int r) { return std::min(round_up(n * r / size_, kLine / size), n); };
    const std::int64_t begin = part(rank_), end = part(rank_ + 1);
    arrive();
    if (const int status = wait_arrived(pass_)) return status;
    void* everywhere[kMaxRanks];
    for (int r = 0; r < size_; ++r) everywhere[r] = reinterpret_cast<void*>(shared.addresses[r] + offset + begin * size);
    data.sum_everywhere(everywhere, size_, end - begin, rows.dtype);
    store_word(mine().done, stamp(pass_, 0));
    return wait_done(pass_);
}

// Source: NCCL's LL protocol idea of data that is its own flag, in the rotating buffers of TensorRT-LLM: the word -0.0 means
// "not written". Who begins call c has read what call c - 2 wrote; so at the end of a call the buffer of the call before
// becomes empty again, as far as stores cost nothing there, and the rest of it while the next call waits. Lines that a
// peer has read cost as much to write as to read: that doubles the time of a call, in any order of these steps. A peer that
// is one call ahead may look at what the rest becomes empty in, but not past the first line, which is.
int Plane::lamport(const Rows& rows, std::int64_t count) {
    const DataKernels& data = data_kernels();
    const std::int64_t n = count * rows.n, bytes = n * size_of(rows.dtype);
    const std::uint32_t turn = post_++;
    // a line in front says which call this is: ranks that differ find out before they read each other's words
    const std::uint32_t call = hash_ == kSentinel ? 1 : hash_;
    auto head = [&](int r) { return reinterpret_cast<std::uint32_t*>(mailbox(r, turn)); };
    __atomic_store_n(head(rank_), call, __ATOMIC_RELEASE);
    data.post(mailbox(rank_, turn) + kLine, rows.in, bytes);
    const std::int64_t cleared = std::min(kStores, spent_);
    data.clear(mailbox(rank_, turn + kMailboxes - 2) + cleared, spent_ - cleared);
    const void* buffers[kMaxRanks];
    for (int r = 0; r < size_; ++r) buffers[r] = r == rank_ ? rows.in : mailbox(r, turn) + kLine;
    for (int k = 1; k < size_; ++k) {
        const int peer = rank_ + k < size_ ? rank_ + k : rank_ + k - size_;
        const int status = wait(peer, [&] {
            const std::uint32_t theirs = __atomic_load_n(head(peer), __ATOMIC_ACQUIRE);
            return theirs == call ? 1 : theirs == kSentinel ? 0 : -1;
        });
        if (status) return status;
    }
    struct Waiting {
        Plane* plane;
        Patience patience;
    } waiting{this, {}};
    auto late = [](void* context, int peer, std::int64_t polls) {
        auto& [plane, patience] = *static_cast<Waiting*>(context);
        if (polls >= (plane->crowded_ ? kSpinCrowded : kSpin)) return plane->patient(peer, patience);
        cpu_pause();
        return true;
    };
    const Mailboxes from{buffers, size_, rank_, late, &waiting};
    if (!data.collect(from, rows.out, n, rows.dtype, rows.e, rows.e ? scratch(round_up(n, kLine)) : nullptr))
        return broken_;
    data.clear(mailbox(rank_, turn + kMailboxes - 1), std::min(kStores, posted_));  // all have begun this call: it is read
    spent_ = posted_, posted_ = bytes + kLine;
    return kDone;
}

// -------------------------------------------------------------------------------------------------------------- experts
// A rank's lent memory: | tokens sent to each rank | come from each | ids [room, k] | weights [room, k] | rows [room] |,
// each part on a line of its own. Senders write; where a sender's tokens begin follows from what all ranks say they send.

std::array<std::int64_t, 5> Plane::arrivals(std::int64_t room, int k, std::int64_t row_bytes) const {
    const std::int64_t counts = round_up(size_ * 8, kLine), table = round_up(room * k * 4, kLine);
    const std::int64_t rows = 2 * (counts + table);
    return {counts, 2 * counts, 2 * counts + table, rows, rows + room * row_bytes};
}

namespace {

struct Arrivals {
    std::int64_t *sent, *came;
    std::int32_t* ids;
    float* weights;
    char* rows;
    Arrivals(std::uintptr_t at, const std::array<std::int64_t, 5>& parts)
        : sent(reinterpret_cast<std::int64_t*>(at)), came(reinterpret_cast<std::int64_t*>(at + parts[0])),
          ids(reinterpret_cast<std::int32_t*>(at + parts[1])), weights(reinterpret_cast<float*>(at + parts[2])),
          rows(reinterpret_cast<char*>(at + parts[3])) {}
};

// Which rank owns an expert; -1: there is no such expert.
struct Owners {
    std::vector<int> of;
    Owners(const std::int32_t* bounds, int size) : of(bounds[size], -1) {
        for (int r = 0; r < size; ++r) std::fill(of.begin() + bounds[r], of.begin() + bounds[r + 1], r);
    }
    int operator()(std::int32_t id) const { return id >= 0 && id < std::int64_t(of.size()) ? of[id] : -1; }
    // The ranks that a token goes to, each once and ascending.
    int ranks(const std::int32_t* ids, int k, int* found) const {
        int count = 0;
        for (int j = 0; j < k; ++j) {
            const int rank = (*this)(ids[j]);
            if (rank >= 0 && std::find(found, found + count, rank) == found + count) found[count++] = rank;
        }
        std::sort(found, found + count);
        return count;
    }
};

}  // namespace

int Plane::dispatch(std::uintptr_t in, const Tokens& mine, const std::int32_t* bounds, std::int64_t room,
                    std::int64_t signature) {
    if (broken_) return broken_;
    const DataKernels& data = data_kernels();
    Shared* shared = find(reinterpret_cast<const void*>(in));
    const Timer timer{*this, kDispatch, mine.count * mine.row_bytes};
    const auto parts = arrivals(room, mine.k, mine.row_bytes);
    const Owners owner(bounds, size_);
    std::vector<Arrivals> at;
    for (int r = 0; r < size_; ++r) at.emplace_back(shared->addresses[r] + (in - shared->addresses[rank_]), parts);
    int ranks[kMaxRanks];
    std::fill_n(at[rank_].sent, size_, 0);
    for (std::int64_t t = 0; t < mine.count; ++t)
        for (int i = owner.ranks(mine.ids + t * mine.k, mine.k, ranks); i--;) ++at[rank_].sent[ranks[i]];
    const std::uint64_t place = (in - shared->addresses[rank_]) << 8 | std::uint64_t(shared->id + 1) << 40;
    if (const int status = begin(kDispatch, mine.row_bytes, kBytes, place ^ std::uint64_t(signature))) return status;
    arrive();
    if (const int status = wait_arrived(pass_)) return status;
    const bool large = 2 * mine.count * mine.row_bytes >= stream_bytes;
    std::int64_t next[kMaxRanks] = {};
    for (int source = 0; source < size_; ++source) {
        at[rank_].came[source] = at[source].sent[rank_];
        for (int r = 0; source < rank_ && r < size_; ++r) next[r] += at[source].sent[r];
    }
    for (std::int64_t t = 0; t < mine.count; ++t) {
        const std::int32_t* ids = mine.ids + t * mine.k;
        const char* row = static_cast<const char*>(mine.rows) + t * mine.row_bytes;
        for (int i = 0, count = owner.ranks(ids, mine.k, ranks); i < count; ++i) {
            const Arrivals& to = at[ranks[i]];
            const std::int64_t place = next[ranks[i]]++;
            data.copy(to.rows + place * mine.row_bytes, row, mine.row_bytes, ranks[i] != rank_ && large);
            std::memcpy(to.weights + place * mine.k, mine.weights + t * mine.k, mine.k * 4);
            for (int j = 0; j < mine.k; ++j)
                to.ids[place * mine.k + j] = owner(ids[j]) == ranks[i] ? ids[j] - bounds[ranks[i]] : -1;
        }
    }
    arrive();
    shared->read_in = call_;
    return wait_arrived(pass_);
}

int Plane::combine(std::uintptr_t in, const Tokens& mine, const std::int32_t* bounds, std::int64_t room, std::int64_t n,
                   int dtype, void* out) {
    if (broken_) return broken_;
    const DataKernels& data = data_kernels();
    Shared* shared = find(reinterpret_cast<const void*>(in));
    const Timer timer{*this, kCombine, mine.count * mine.row_bytes};
    const std::uint64_t place = (in - shared->addresses[rank_]) << 8 | std::uint64_t(shared->id + 1) << 40;
    if (const int status = begin(kCombine, mine.row_bytes, dtype, place)) return status;
    arrive();
    shared->read_in = call_;
    if (const int status = wait_arrived(pass_)) return status;
    const auto parts = arrivals(room, mine.k, mine.row_bytes);
    const Owners owner(bounds, size_);
    const char* next[kMaxRanks];
    for (int r = 0; r < size_; ++r) {
        const Arrivals there(shared->addresses[r] + (in - shared->addresses[rank_]), parts);
        next[r] = there.rows;
        for (int source = 0; source < rank_; ++source) next[r] += there.came[source] * mine.row_bytes;
    }
    int ranks[kMaxRanks];
    for (std::int64_t t = 0; t < mine.count; ++t) {
        const void* from[kMaxRanks];
        const int count = owner.ranks(mine.ids + t * mine.k, mine.k, ranks);
        for (int i = 0; i < count; ++i) from[i] = std::exchange(next[ranks[i]], next[ranks[i]] + mine.row_bytes);
        data.sum(static_cast<char*>(out) + t * mine.row_bytes, from, count, n, dtype, false);
    }
    return kDone;
}

// Attention over a sequence that is cut over the ranks: what each made of its part, combined by its softmax.
int Plane::combine_parts(std::uintptr_t in, const Parts& parts, int dtype, void* out) {
    if (broken_) return broken_;
    const DataKernels& data = data_kernels();
    Shared* shared = find(reinterpret_cast<const void*>(in));
    const std::int64_t row_bytes = parts.width * size_of(dtype), all = parts.rows * parts.heads;
    const Timer timer{*this, kAllToAll, all * (row_bytes + 8)};
    const std::uint64_t place = (in - shared->addresses[rank_]) << 8 | std::uint64_t(shared->id + 1) << 40;
    if (const int status = begin(kAllToAll, all * row_bytes, dtype, place)) return status;
    arrive();
    shared->read_in = call_;
    if (const int status = wait_arrived(pass_)) return status;
    const char* from[kMaxRanks];
    for (int r = 0; r < size_; ++r)
        from[r] = reinterpret_cast<const char*>(shared->addresses[r] + (in - shared->addresses[rank_]));
    const std::int64_t behind = round_up(all * 8, kLine);
    for (std::int64_t row = 0; row < parts.rows; ++row)
        for (std::int64_t head = parts.first; head < parts.last; ++head) {
            const std::int64_t at = row * parts.heads + head;
            const void* seen[kMaxRanks];
            float top[kMaxRanks], weight[kMaxRanks], best = 0, total = 0;
            int count = 0;
            for (int r = 0; r < size_; ++r) {
                const float* stats = reinterpret_cast<const float*>(from[r]) + 2 * at;
                if (stats[1] == 0) continue;  // it saw nothing: its row is not read
                best = count == 0 || stats[0] > best ? stats[0] : best;
                seen[count] = from[r] + behind + at * row_bytes;
                top[count] = stats[0], weight[count++] = stats[1];
            }
            for (int i = 0; i < count; ++i) total += weight[i] *= std::exp(top[i] - best);
            for (int i = 0; i < count; ++i) weight[i] /= total;
            data.blend(out, seen, weight, count, parts.width, dtype);
            out = static_cast<char*>(out) + row_bytes;
        }
    return kDone;
}

// FP8 blocks on the wire, fp32 sums; own rows go the same way, so all ranks get the same bits.
int Plane::low_precision(const Rows& rows, std::int64_t count) {
    const DataKernels& data = data_kernels();
    const std::int64_t n = count * rows.n, size = size_of(rows.dtype);
    const std::int64_t blocks = slot_bytes_ / scaled_bytes(kScaled);
    const std::int64_t chunk = blocks * kScaled / rows.n * rows.n;  // elements of a pass: whole rows
    float* sums = scratch(std::min(chunk, n));
    for (std::int64_t at = 0; at < n || at == 0; at += chunk) {
        const std::int64_t some = std::min(chunk, n - at);
        data.pack(slot(rank_, pass_ + 1), static_cast<const char*>(rows.in) + at * size, some, rows.dtype);
        arrive();
        if (const int status = wait_arrived(pass_)) return status;
        const void* sources[kMaxRanks];
        for (int source = 0; source < size_; ++source) sources[source] = slot(source, pass_);
        data.sum_packed(sums, sources, size_, some);
        data.round(static_cast<char*>(rows.out) + at * size, sums, some, rows.dtype, rows.e, at / rows.n);
    }
    return kDone;
}

}  // namespace spmd
