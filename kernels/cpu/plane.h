// Purpose: the collectives of one group of ranks on one host, over memory that all of them have mapped.
// Method:  every rank owns one region and publishes in it; the others read. A message is cut into passes; pass number p
//          uses slot p % 4 of every region and one word per rank, which carries p and a hash of the call:
//
//              region of a rank:  | words | 3 mailboxes (Lamport) | 4 slots |
//              one pass:          copy own rows to the slot, arrive = (p, hash) -> wait for everybody's arrive -> read
//
//          Inside a message a rank publishes pass p + 1 before it finishes pass p. So arrive = p says that its owner has
//          finished reading pass p - 2, and four slots are enough with one wait per pass. A message ends with all its
//          passes finished by its rank; a rank that has completed a call knows that every other has begun it. What the
//          words mean and why nobody reads a stale slot is checked in protocol/.
// Requirement: all ranks make the same calls in the same order. Those that do not find out while they wait: the hash
//          differs (of a mailbox: its first line), or the other rank is elsewhere (its `call` word). Any rank count up to kMaxRanks.
// Use:     module.cpp binds it as spmd._cpu.Plane; spmd/collectives/cpu.py is the only caller.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cpu/data.h"
#include "cpu/waits.h"

namespace spmd {

enum Op : int { kBarrier, kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast, kExchange, kDispatch, kCombine, kOps };
enum Algorithm : int { kLamport, kOneShot, kTwoShot, kLowPrecision, kCopied = 15 };  // kCopied: as ordinary memory
enum Status : int { kDone, kLate, kDiffers, kDead, kGivenUp, kInterrupted, kClosed, kTooLong };

// What a rank shows the others; it alone writes it. The first line is what a pass costs, the second is for a second wait
// (two-shot: my part is summed; zero copy: I have read your memory).
struct alignas(128) Words {
    std::uint64_t arrive;   // pass << 32 | hash
    std::uint64_t gave_up;  // call << 32 | the rank it is about << 8 | 1 + status
    std::uint64_t call[2];  // call << 32 | hash, of the latest two calls: a rank may be one ahead of another
    std::uint64_t what[2];  // op << 56 | dtype << 48 | bytes
    alignas(128) std::uint64_t done;  // pass << 32
};

// A message's rows on their way out: `rows` rows from row `at` of every source's tensor, summed in the order of the
// sources, become rows [out, out + rows) here. Sources of one piece hold the same rows at the same place.
struct Piece {
    std::int64_t out, at, rows;
    std::vector<int> sources;
};
struct RowMap {
    std::vector<Piece> pieces;
    std::int64_t rows;      // that this rank publishes
    std::int64_t max_rows;  // that any rank publishes
};

// The rows of a call on their way through: what is added on entering and done on leaving.
struct Rows {
    const void* in;
    void* out;
    std::int64_t n;  // elements of a row
    int dtype;
    const void* fold;   // added to what this rank publishes; null: nothing
    const Epilogue* e;  // done to summed rows; null: nothing
};

// Tokens with the experts that they were routed to: rows of row_bytes, [count, k] expert numbers and weights.
struct Tokens {
    std::int64_t count;
    int k;
    std::int64_t row_bytes;
    const void* rows;
    const std::int32_t* ids;
    const float* weights;
};

// Rows of attention over a part of a sequence: of `heads` heads, of which this rank is to have first ... last - 1.
struct Parts {
    std::int64_t rows, heads, first, last, width;
};

struct Total {
    std::int64_t calls = 0, bytes = 0, ns = 0;
};
struct Event {
    int op;
    std::int64_t bytes, start_ns, end_ns;
};

class Plane {
public:
    // regions: where each rank's region is mapped here. processes: a pidfd of each rank (-1: not watched).
    Plane(int rank, const std::vector<std::uintptr_t>& regions, const std::vector<int>& processes,
          std::int64_t mailbox_bytes, std::int64_t slot_bytes, bool crowded);

    static std::int64_t region_bytes(std::int64_t mailbox_bytes, std::int64_t slot_bytes);

    // All return a Status. bytes of a row (n elements) must fit a slot.
    int barrier();
    // `symmetric`: how rows that lie in symmetric memory are summed; in place, every algorithm but kLamport is the same
    int all_reduce(Algorithm ordinary, Algorithm symmetric, const Rows& rows, std::int64_t count);
    int exchange(Op op, const RowMap& map, const Rows& rows, std::uint64_t signature);

    // An all-reduce whose rows are still being made, in symmetric memory: `publish` says that the next part of them is
    // there, `complete` finishes the part with that number. Every rank publishes one part ahead, so nobody waits.
    int start(std::int64_t bytes, int dtype, std::uintptr_t in);
    void publish();
    int complete(std::uint32_t part, const Rows& rows, std::int64_t first, std::int64_t count);

    // Tokens to the ranks that own their experts, and back; `in`: where they arrive, in lent memory, for `room` tokens and
    // the same on all ranks; bounds[r] ... bounds[r + 1]: the experts of rank r. dispatch: mine are at their ranks and
    // theirs here, in the order of source and token, with expert numbers (-1: not one of these) and weights. combine:
    // out[t] = T(sum) of the rows that token t has become, in rank order. arrivals: offsets of how many came from each
    // source, of the numbers, the weights and the rows, and the bytes of all.
    int dispatch(std::uintptr_t in, const Tokens& mine, const std::int32_t* bounds, std::int64_t room,
                 std::int64_t signature);
    int combine(std::uintptr_t in, const Tokens& mine, const std::int32_t* bounds, std::int64_t room, std::int64_t n,
                int dtype, void* out);
    // What ranks made of their parts of a sequence, in lent memory: softmax stats [rows, heads] of (largest score, sum of
    // exp(score - largest), 0: saw nothing) and, from the next line on, o [rows, heads, width], divided by that sum. out:
    // the whole of this rank's heads, [rows, last - first, width].
    int combine_parts(std::uintptr_t in, const Parts& parts, int dtype, void* out);
    std::array<std::int64_t, 5> arrivals(std::int64_t room, int k, std::int64_t row_bytes) const;

    // Symmetric memory by address: a tensor inside is read where it lies. lent: memory of the plane's own workspace,
    // whose writer asks `ready` before it writes again, so that nobody waits for its readers.
    void add_region(int id, const std::vector<std::uintptr_t>& addresses, std::int64_t bytes, bool lent);
    void remove_region(int id);
    bool symmetric(std::uintptr_t address) { return find(reinterpret_cast<const void*>(address)) != nullptr; }
    int ready(int id);
    void close() { broken_ = kClosed; }  // the regions go: every later call says so

    // settings
    double timeout_s = 300;
    std::int64_t chunk_bytes = 32 << 10;    // of a pass of a message that has several
    std::int64_t stream_chunk_bytes = 64 << 10;
    std::int64_t stream_bytes = 4 << 20;    // messages from here on do not stay in cache: non-temporal stores
    bool timeline = false;
    bool (*idle)() = nullptr;  // called now and then by a long wait; false: stop waiting

    // reports
    std::vector<Total> totals = std::vector<Total>(kOps);
    std::vector<Event> events;
    int odd = -1;  // after a failure: the rank that it is about
    const Words& words(int rank) const { return *reinterpret_cast<const Words*>(regions_[rank]); }
    std::int64_t mailbox_bytes() const { return mailbox_bytes_ - kLine; }
    std::int64_t slot_bytes() const { return slot_bytes_; }
    std::uint32_t call() const { return call_; }

private:
    struct Shared {
        int id;
        std::vector<std::uintptr_t> addresses;
        std::int64_t bytes;
        bool lent;
        std::uint32_t read_in;  // the call that last read it
    };
    struct Timer;
    struct Patience;

    Words& mine() { return *reinterpret_cast<Words*>(regions_[rank_]); }
    char* mailbox(int rank, std::uint32_t which) const;
    char* slot(int rank, std::uint32_t pass) const;
    Shared* find(const void* address);
    bool overwrites(const Rows& rows, const Shared& shared) const;
    int begin(Op op, std::int64_t bytes, int dtype, std::uint64_t signature);
    void arrive();
    bool differs(const Words& theirs) const;
    int wait_arrived(std::uint32_t pass);
    int wait_done(std::uint32_t pass);
    template <class Ready>
    int wait(int peer, Ready ready);
    bool patient(int peer, Patience& patience);
    int ask_about(int peer, Patience& patience);
    int fail(int status, int peer);
    int lamport(const Rows& rows, std::int64_t count);
    int two_shot(const Rows& rows, std::int64_t count, Shared* shared);
    int in_place(const Rows& rows, std::int64_t count, Shared& shared);
    int low_precision(const Rows& rows, std::int64_t count);
    int pass_rows(const RowMap& map, const Rows& rows, Shared* shared);
    void sum_rows(const Rows& rows, std::int64_t out_row, const void* const* in, int count, std::int64_t n_rows,
                  bool stream);
    float* scratch(std::int64_t floats);

    int rank_, size_;
    std::vector<std::uintptr_t> regions_;
    std::vector<int> processes_;
    std::int64_t mailbox_bytes_, slot_bytes_;  // of one, a mailbox with the line in front
    bool crowded_;
    std::uint32_t pass_ = 0, call_ = 0, hash_ = 0, post_ = 0;
    std::uint32_t started_ = 0;  // the pass before the first of a message whose rows are still being made
    std::int64_t posted_ = 0, spent_ = 0;  // bytes in the mailboxes of the call before and the one before that
    int broken_ = kDone;
    RowMap everyone_;  // all-reduce as a row map
    std::vector<float> scratch_;
    std::vector<Shared> shared_;
};

}  // namespace spmd
