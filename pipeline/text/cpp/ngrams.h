// Recurring n-grams of a text, found with hash tables. An n-gram is known by a 64-bit code.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tokens.h"

namespace ngrams {

// Maps codes to counters, by open addressing; made for at most `size` codes.
class Counters {
public:
    struct Slot {
        uint64_t code;
        uint32_t count;  // 0: free
        uint32_t first;
    };

    // Removes all codes, and makes room for `size` of them.
    void reset(size_t size) {
        size_t bits = 4;
        while ((size_t{1} << bits) < 2 * size) ++bits;
        slots_.assign(size_t{1} << bits, Slot{});
        mask_ = slots_.size() - 1, shift_ = 64 - bits;
    }

    // Returns the slot of a code; a new one has the count 0. The caller increases the count.
    Slot& at(uint64_t code) {
        size_t slot = (code * odd_) >> shift_;
        while (slots_[slot].count && slots_[slot].code != code) slot = (slot + 1) & mask_;
        slots_[slot].code = code;
        return slots_[slot];
    }
    const std::vector<Slot>& slots() const { return slots_; }

private:
    std::vector<Slot> slots_;
    size_t mask_ = 0, shift_ = 60;
    const uint64_t odd_ = drawn_odd();
};

// The recurring n-grams of one size. An n-gram recurs if it occurs more than once.
struct Recurring {
    std::vector<int64_t> places;  // the first word of each occurrence, ascending
    std::vector<int64_t> firsts;  // the first word of the first occurrence of each of the most frequent n-grams
    int64_t most = 1;             // occurrences of the most frequent n-gram
};

// Finds the recurring n-grams of the sizes 2, 3, ... An n-gram recurs only where one with a word less does.
class Growing {
public:
    explicit Growing(const uint64_t* codes, size_t size) : codes_(codes), size_(size), grams_(codes, codes + size) {
        places_.resize(size);
        for (size_t at = 0; at < size; ++at) places_[at] = static_cast<int64_t>(at);
    }

    Recurring next() {
        ++n_;
        size_t kept = 0;
        for (size_t at = 0; at < places_.size() && static_cast<size_t>(places_[at]) + n_ <= size_; ++at, ++kept)
            grams_[at] = grams_[at] * PAIR + codes_[static_cast<size_t>(places_[at]) + n_ - 1];
        places_.resize(kept);
        counters_.reset(kept);
        Recurring out;
        for (size_t at = 0; at < kept; ++at) {
            auto& slot = counters_.at(grams_[at]);
            if (!slot.count++) slot.first = static_cast<uint32_t>(at);
            out.most = std::max<int64_t>(out.most, slot.count);
        }
        size_t left = 0;
        for (size_t at = 0; at < kept && out.most > 1; ++at) {
            const auto& slot = counters_.at(grams_[at]);
            if (slot.count == 1) continue;
            if (slot.count == out.most && slot.first == at) out.firsts.push_back(places_[at]);
            places_[left] = places_[at], grams_[left++] = grams_[at];
        }
        places_.resize(left);
        out.places = places_;
        return out;
    }

private:
    const uint64_t* codes_;
    size_t size_, n_ = 1;
    std::vector<uint64_t> grams_;
    std::vector<int64_t> places_;
    Counters counters_;
};

// A set of codes, by open addressing, made for at most `size` codes.
class Seen {
public:
    void reset(size_t size) {
        size_t bits = 4;
        while ((size_t{1} << bits) < 2 * size) ++bits;
        slots_.assign(size_t{1} << bits, 0);
        mask_ = slots_.size() - 1, shift_ = 64 - bits, zero_ = false;
    }
    // Adds a code, and returns whether it was there before.
    bool add(uint64_t code) {
        if (!code) return std::exchange(zero_, true);
        size_t slot = (code * odd_) >> shift_;
        for (; slots_[slot]; slot = (slot + 1) & mask_)
            if (slots_[slot] == code) return true;
        slots_[slot] = code;
        return false;
    }

private:
    std::vector<uint64_t> slots_;  // 0: free
    size_t mask_ = 0, shift_ = 60;
    const uint64_t odd_ = drawn_odd();
    bool zero_ = false;
};

inline uint64_t inverse(uint64_t odd) {
    uint64_t value = odd;  // correct to 3 bits; each step doubles them
    for (int step = 0; step < 5; ++step) value *= 2 - odd * value;
    return value;
}

// Gopher's counts of a text of words: the characters in all occurrences of the most frequent n-gram for n = 2, 3, 4,
// with spaces between words, and those in repeated n-grams for n = 5 to 10.
inline std::array<int64_t, 9> gopher(const uint64_t* codes, const int64_t* lengths, size_t size) {
    std::array<int64_t, 9> out{};
    std::vector<int64_t> offsets(size + 1);
    for (size_t at = 0; at < size; ++at) offsets[at + 1] = offsets[at] + lengths[at];
    Growing growing(codes, size);
    for (size_t n = 2; n <= 4; ++n) {
        const Recurring found = growing.next();
        if (size < n) continue;
        const auto first = found.firsts.empty() ? 0 : static_cast<size_t>(found.firsts.front());
        out[n - 2] = (offsets[first + n] - offsets[first] + static_cast<int64_t>(n) - 1) * found.most;
    }
    // The code of the n-gram without separators is a slice of the text's polynomial, shifted to the start: `sums` has
    // the polynomial up to each word, and `back` the power of the inverse that shifts it.
    std::vector<uint64_t> sums(size + 1), back(size + 1);
    const uint64_t down = inverse(BASE);
    uint64_t power = 1, shift = 1;
    for (size_t at = 0; at < size; ++at) {
        sums[at + 1] = sums[at] + codes[at] * power;
        back[at] = shift;
        for (int64_t step = 0; step < lengths[at]; ++step) power *= BASE, shift *= down;
    }
    Seen seen;
    for (size_t n = 5; n <= 10 && n <= size; ++n) {
        seen.reset(size - n + 1);
        for (size_t at = 0; at + n <= size;) {
            const bool repeated = seen.add((sums[at + n] - sums[at]) * back[at]);
            if (repeated) out[n - 2] += offsets[at + n] - offsets[at];
            at += repeated ? n : 1;
        }
    }
    return out;
}

}  // namespace ngrams
