// What a product prefetches while it computes: the weights that follow, and the K and V that attention reads next.
//
// Attention to many sequences waits for memory, and a product with many rows leaves memory idle. So what attention
// reads is prefetched while the products before it compute: not to stay in a core's own cache, which is too small for
// it, but through that into the one that it shares with some other cores. So each thread prefetches what it is going to
// read itself. This changes when memory is read, not what is computed.
#pragma once

#include "threads.hpp"
#include "vector.hpp"

namespace {

// Products work on this many units at once, or on a part of them.
constexpr int kRunUnits = 16;

struct Span {
    const char* at;
    int64_t bytes;
};

// Some blocks of each layer's cache, ordered by the share of attention that reads them.
struct BlocksAhead {
    int32_t* ids;
    int64_t ends[kMostShares];  // where each share's ids end
    int num_shares;
    int64_t bytes;   // of a block in K's cache, and in V's
    int64_t stride;  // bytes from one block to the next, in either cache

    int64_t count() const { return num_shares > 0 ? ends[num_shares - 1] : 0; }
    int64_t all_bytes() const { return 2 * count() * bytes; }
};

// A layer's K and V in these blocks: K of the first block, its V, K of the second, and so on. Each thread takes spans
// from its own share, and leaves the others' alone: not being slowed down matters more than prefetching everything.
struct ContextAhead {
    struct alignas(64) Left {  // in a cache line of its own
        int64_t next, end;
    };
    const BlocksAhead* blocks;
    const char* caches[2];
    Left shares[kMostShares];

    ContextAhead(const BlocksAhead& blocks, const char* k, const char* v) : blocks(&blocks), caches{k, v} {
        for (int i = 0; i < blocks.num_shares; ++i) shares[i] = {i > 0 ? 2 * blocks.ends[i - 1] : 0, 2 * blocks.ends[i]};
    }

    // Takes the next span; an empty one if there are no more. Threads with the same share may get the same one.
    Span take(int thread) {
        if (blocks->num_shares == 0) return {};
        Left& left = shares[thread % blocks->num_shares];
        const int64_t number = __atomic_load_n(&left.next, __ATOMIC_RELAXED);
        if (number >= left.end) return {};
        __atomic_store_n(&left.next, number + 1, __ATOMIC_RELAXED);
        return {caches[number % 2] + blocks->ids[number / 2] * blocks->stride, blocks->bytes};
    }
};

// What is prefetched with some consecutive units of a tile: `bytes` with each unit.
struct Run {
    const char* at;
    int bytes;
    int num_units;  // a multiple of kRunUnits, or all that are left
};

// The most runs of one tile. They are found before its first unit: a call between two units would spill all sums.
constexpr int kMostRuns = 8;

// What a thread prefetches.
class Ahead {
  public:
    Ahead(ContextAhead* context, int thread) : context_(context), thread_(thread) {}

    // Begins the tiles of some rows: they prefetch some weights, and then `context_bytes` of the context.
    void begin(Span weights, int64_t context_bytes) {
        weights_ = weights;
        context_bytes_ = context_ != nullptr ? whole_lines(context_bytes) : 0;
    }

    // Shares out among a tile's units what is still to be prefetched, or, if `num_tiles` are left with this one, its
    // part. Not inlined, since there are many kinds of tiles.
    __attribute__((noinline)) void share(int num_units, int num_tiles, Run (&runs)[kMostRuns]) {
        Span weights = take(weights_, whole_lines(weights_.bytes / num_tiles));
        int64_t context_bytes = whole_lines(context_bytes_ / num_tiles);
        context_bytes_ -= context_bytes;
        for (int i = 0; num_units > 0; num_units -= runs[i++].num_units) {
            const int64_t all_bytes = weights.bytes + context_bytes;
            const Span span = weights.bytes > 0 ? take(weights, weights.bytes) : take_context(context_bytes);
            int count = num_units;
            if (span.bytes > 0 && i + 1 < kMostRuns)
                count = least(round_up((int)(num_units * span.bytes / all_bytes) + 1, kRunUnits), num_units);
            runs[i] = {span.at, (int)((span.bytes + count - 1) / count), count};
        }
    }

    // The bytes still to be prefetched.
    int64_t num_bytes() const { return weights_.bytes + context_bytes_; }

    // The next contiguous ones of these; none if there are no more.
    __attribute__((noinline)) Span next() {
        return weights_.bytes > 0 ? take(weights_, weights_.bytes) : take_context(context_bytes_);
    }

  private:
    static Span take(Span& from, int64_t bytes) {
        const Span taken = {from.at, bytes < from.bytes ? bytes : from.bytes};
        from = {from.at + taken.bytes, from.bytes - taken.bytes};
        return taken;
    }

    // Takes some of the next `bytes` and subtracts them; if the context has no more, takes none and sets `bytes` to 0.
    Span take_context(int64_t& bytes) {
        if (bytes > 0 && span_.bytes == 0) span_ = context_->take(thread_);
        const Span taken = take(span_, bytes);
        bytes = taken.bytes > 0 ? bytes - taken.bytes : 0;
        return taken;
    }

    ContextAhead* const context_;
    const int thread_;
    Span weights_ = {};          // still to be prefetched by these tiles
    int64_t context_bytes_ = 0;  // likewise
    Span span_ = {};             // what is left of the context's current span
};

// The same in steps of equal bytes. Contiguous memory is found on the way, not before the first step.
class Pace {
  public:
    Pace(Ahead& ahead, int num_steps) : ahead_(ahead), step_bytes_((ahead.num_bytes() + num_steps - 1) / num_steps) {}

    // The next steps, as many as prefetch contiguous memory, but at most `most`. Between these nothing has to be found,
    // so that sums stay in registers.
    ALWAYS_INLINE Run next(int most) {
        const int count = end_ - at_ >= most * step_bytes_ ? most : find(most);
        const Run run = {at_, (int)step_bytes_, count};
        at_ += count * step_bytes_;
        return run;
    }

  private:
    // Returns how many of `most` steps are contiguous, at least one: if the contiguous memory left is less than a step,
    // it is prefetched here, and more is found.
    __attribute__((noinline)) int find(int most) {
        for (int64_t left = step_bytes_; end_ - at_ < left;) {
            left -= end_ - at_;
            for (; at_ < end_; at_ += 64) __builtin_prefetch(at_, 0, 2);
            const Span span = ahead_.next();
            if (span.bytes == 0) step_bytes_ = left = 0;
            at_ = span.at, end_ = span.at + span.bytes;
        }
        return step_bytes_ == 0 ? most : least(most, (int)((end_ - at_) / step_bytes_));
    }

    Ahead& ahead_;
    int64_t step_bytes_;
    const char *at_ = nullptr, *end_ = nullptr;  // contiguous memory still to be prefetched
};

// Prefetches the lines of a run from `line` on, up to the end of what the next `num_units` units prefetch.
ALWAYS_INLINE void ask(const char*& line, Run& run, int num_units) {
    run.at += num_units * run.bytes;
    for (; line < run.at; line += 64) __builtin_prefetch(line, 0, 2);
}

}  // namespace
