// Predictions of a supervised fastText model, from the bytes of its file.
//
// The result is that of `fasttext.load_model(path).predict`: the same additions of 32-bit floats in the same order. That
// package is compiled for the processor of the machine, which may fuse additions with multiplications. This is not, so
// that every processor gives the same probabilities with the same C library.
// Sources: Bojanowski et al., arXiv 1607.04606 (subwords), Joulin et al., arXiv 1607.01759 (classifier, hierarchical
// softmax) and arXiv 1612.03651 (product quantization, pruned features); the format is that of fastText 0.9.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "characters.h"

namespace fasttext {

constexpr std::string_view END_OF_LINE = "</s>", LABEL = "__label__";
constexpr int CENTROIDS = 256;
constexpr int64_t MAX_EXPANDED = 16 << 20;  // numbers of a quantized matrix, at most, that are kept as 32-bit floats
constexpr int64_t MAX_COUNT = 1000000000000000;
constexpr int32_t MAX_NGRAM = 100;

enum Loss { HIERARCHICAL_SOFTMAX = 1, NEGATIVE_SAMPLING = 2, SOFTMAX = 3, ONE_VS_ALL = 4 };
constexpr int32_t SUPERVISED = 3;

// Raised for a file that is not a model; the message is the second part of an error of the caller.
[[noreturn]] inline void refuse(const char* what) {
    PyErr_SetString(PyExc_ValueError, what);
    throw PythonError();
}

// Reads numbers and arrays of a file in order; refuses to read past its end.
class FileReader {
public:
    FileReader(const char* data, size_t size) : data_(data), left_(size) {}

    template <class Value>
    Value number() {
        Value value;
        std::memcpy(&value, take(sizeof(Value)), sizeof(Value));
        return value;
    }

    const char* take(uint64_t size) {
        if (size > left_) refuse("the file ends early");
        const char* start = data_;
        data_ += size, left_ -= size;
        return start;
    }

    const char* array(int64_t items, int64_t width) {
        if (items < 0 || width < 1 || static_cast<uint64_t>(items) > left_ / width) refuse("the file ends early");
        return take(static_cast<uint64_t>(items) * width);
    }

    std::string_view text() {
        const void* end = std::memchr(data_, 0, left_);
        if (!end) refuse("the file ends early");
        const auto size = static_cast<size_t>(static_cast<const char*>(end) - data_);
        return {take(size + 1), size};
    }

private:
    const char* data_;
    size_t left_;
};

inline float float_at(const char* data, int64_t index) {
    float value;
    std::memcpy(&value, data + 4 * index, 4);
    return value;
}

// Vectors of `columns` numbers as codes: in each part, one of 256 centroids.
class Quantizer {
public:
    void read(FileReader& file, int64_t columns) {
        const auto size = file.number<int32_t>();
        parts_ = file.number<int32_t>(), width_ = file.number<int32_t>(), last_ = file.number<int32_t>();
        const bool fits = size == columns && parts_ > 0 && width_ > 0 && last_ > 0 && last_ <= width_;
        if (!fits || int64_t{parts_ - 1} * width_ + last_ != columns) refuse("its quantized vectors have no valid parts");
        centroids_ = file.array(columns * CENTROIDS, 4);
    }

    int parts() const { return parts_; }

    float first(uint8_t code) const { return float_at(centroids_, code); }

    // Calls `use(column, number)` for each number of a vector.
    template <class Use>
    void each(const uint8_t* codes, Use use) const {
        for (int part = 0; part < parts_; ++part) {
            const int width = part == parts_ - 1 ? last_ : width_;
            const int64_t base = int64_t{part} * CENTROIDS * width_ + int64_t{codes[part]} * width;
            for (int at = 0; at < width; ++at) use(part * width_ + at, float_at(centroids_, base + at));
        }
    }

private:
    int32_t parts_ = 0, width_ = 0, last_ = 0;
    const char* centroids_ = nullptr;
};

// A matrix as the file stores it: numbers, or codes of its rows and of their norms.
class Matrix {
public:
    void read(FileReader& file, bool is_quantized, int64_t columns) {
        is_quantized_ = is_quantized, columns_ = columns;
        const bool has_norms = is_quantized && file.number<uint8_t>() != 0;
        rows_ = file.number<int64_t>();
        if (rows_ < 0 || file.number<int64_t>() != columns) refuse("its vectors have another size than it says");
        if (!is_quantized) {
            if (rows_ > INT64_MAX / (4 * columns)) refuse("the file ends early");
            numbers_ = file.array(rows_ * columns, 4);
            return;
        }
        const auto size = file.number<int32_t>();
        codes_ = reinterpret_cast<const uint8_t*>(file.array(size, 1));
        quantizer_.read(file, columns);
        if (int64_t{size} % quantizer_.parts() || int64_t{size} / quantizer_.parts() != rows_)
            refuse("its quantized vectors have no valid parts");
        if (has_norms) {
            norm_codes_ = reinterpret_cast<const uint8_t*>(file.array(rows_, 1));
            norms_.read(file, 1);
        }
    }

    int64_t rows() const { return rows_; }

    // Keeps the numbers of a quantized matrix, if they are not too many.
    void expand() {
        if (!is_quantized_ || rows_ > MAX_EXPANDED / columns_) return;
        expanded_.resize(static_cast<size_t>(rows_ * columns_));
        for (int64_t row = 0; row < rows_; ++row) {
            float* out = expanded_.data() + row * columns_;
            const float norm = norm_of(row);
            quantizer_.each(codes_ + row * quantizer_.parts(), [&](int at, float value) { out[at] = norm * value; });
        }
    }

    void add(int64_t row, float* sums) const {
        if (!expanded_.empty()) {
            const float* values = expanded_.data() + row * columns_;
            for (int64_t at = 0; at < columns_; ++at) sums[at] += values[at];
        } else if (is_quantized_) {
            const float norm = norm_of(row);
            quantizer_.each(codes_ + row * quantizer_.parts(), [&](int at, float value) { sums[at] += norm * value; });
        } else {
            for (int64_t at = 0; at < columns_; ++at) sums[at] += float_at(numbers_, row * columns_ + at);
        }
    }

    float product(int64_t row, const float* vector) const {
        float sum = 0;
        if (is_quantized_) {
            quantizer_.each(codes_ + row * quantizer_.parts(), [&](int at, float value) { sum += vector[at] * value; });
            return sum * norm_of(row);
        }
        for (int64_t at = 0; at < columns_; ++at) sum += float_at(numbers_, row * columns_ + at) * vector[at];
        return sum;
    }

private:
    float norm_of(int64_t row) const { return norm_codes_ ? norms_.first(norm_codes_[row]) : 1.0f; }

    bool is_quantized_ = false;
    int64_t rows_ = 0, columns_ = 0;
    const char* numbers_ = nullptr;
    const uint8_t *codes_ = nullptr, *norm_codes_ = nullptr;
    Quantizer quantizer_, norms_;
    std::vector<float> expanded_;
};

// The buckets of n-grams that a pruned model has kept, each with its number.
class KeptBuckets {
public:
    void read(FileReader& file, int64_t count, int32_t buckets) {
        bits_.assign(static_cast<size_t>(buckets) / 64 + 1, 0);
        for (int64_t at = 0; at < count; ++at) {
            const auto bucket = file.number<int32_t>(), number = file.number<int32_t>();
            if (bucket < 0 || bucket >= buckets || number < 0) refuse("its list of n-grams has invalid numbers");
            bits_[static_cast<size_t>(bucket) / 64] |= uint64_t{1} << bucket % 64;
            numbers_[bucket] = number, most_ = std::max(most_, number);
        }
        slots_.assign(size_t{1} << size_bits(numbers_.size()), {-1, 0});
        for (const auto& [bucket, number] : numbers_) slots_[slot_of(bucket)] = {bucket, number};
        numbers_.clear();
    }

    int32_t most() const { return most_; }

    // Returns the number of a bucket, or -1.
    int32_t number_of(int32_t bucket) const {
        if (!(bits_[static_cast<size_t>(bucket) / 64] >> bucket % 64 & 1)) return -1;
        return slots_[slot_of(bucket)].second;
    }

private:
    static int size_bits(size_t items) {
        int bits = 4;
        while ((size_t{1} << bits) < 2 * items) ++bits;
        return bits;
    }

    // Returns the slot of a bucket, or the free one for it.
    size_t slot_of(int32_t bucket) const {
        const size_t mask = slots_.size() - 1;
        size_t slot = static_cast<uint32_t>(bucket) * 2654435769u >> 7 & mask;
        while (slots_[slot].first >= 0 && slots_[slot].first != bucket) slot = (slot + 1) & mask;
        return slot;
    }

    std::vector<uint64_t> bits_;
    std::vector<std::pair<int32_t, int32_t>> slots_;
    std::unordered_map<int32_t, int32_t> numbers_;
    int32_t most_ = -1;
};

using Prediction = std::pair<float, int32_t>;  // logarithm of a probability, number of a label

inline bool more_probable(const Prediction& left, const Prediction& right) { return left.first > right.first; }

// As the probabilities of fastText, which are at least 1e-5.
inline float log_of(float value) { return static_cast<float>(std::log(value + 1e-5)); }

class Model {
public:
    explicit Model(PyObject* data) : data_(data) {
        if (!PyBytes_Check(data)) refuse("expected bytes");
        FileReader file(PyBytes_AS_STRING(data), static_cast<size_t>(PyBytes_GET_SIZE(data)));
        read_settings(file);
        read_words(file);
        const bool is_quantized = file.number<uint8_t>() != 0;
        if (is_pruned_ && !is_quantized) refuse("its n-grams are pruned, but its vectors are not quantized");
        input_.read(file, is_quantized, columns_);
        output_.read(file, is_quantized & (file.number<uint8_t>() != 0), columns_);
        const int64_t rows = num_words_ + (is_pruned_ ? int64_t{kept_.most()} + 1 : has_ngrams() ? buckets_ : 0);
        if (input_.rows() < rows || output_.rows() < num_labels()) refuse("it has fewer vectors than words and labels");
        input_.expand();
        if (loss_ == HIERARCHICAL_SOFTMAX) build_tree();
        Py_INCREF(data_);
    }
    ~Model() { Py_DECREF(data_); }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    int32_t num_labels() const { return static_cast<int32_t>(labels_.size()); }
    std::string_view label(int32_t number) const { return labels_[number]; }

    // Returns the `most` most probable labels of a line, in order; all if `most` is 0. None if no word has a vector.
    std::vector<Prediction> predict(std::string_view line, int32_t most) {
        read_line(line);
        std::vector<Prediction> found;
        if (!num_vectors_) return found;
        const auto share = static_cast<float>(1.0 / num_vectors_);
        for (float& sum : sums_) sum *= share;
        const size_t size = most < 1 ? labels_.size() : static_cast<size_t>(most);
        if (loss_ != HIERARCHICAL_SOFTMAX) {
            by_shares(size, found);
        } else {
            const int32_t root = static_cast<int32_t>(nodes_.size()) - 1;
            // Less probable labels are left out.
            const float least = log_of(0);
            descend(root, 0, size, size == 1 ? std::max(least, greedy(root) - MARGIN) : least, found);
        }
        std::sort_heap(found.begin(), found.end(), more_probable);
        return found;
    }

private:
    struct Node {
        int32_t left = -1, right = -1;
        int64_t count = MAX_COUNT;
    };
    // The logarithms of a path add up to more than those of its start by 1e-5 for each node, at most.
    static constexpr float MARGIN = 0.01f;

    bool has_ngrams() const { return max_chars_ > 0 || max_words_ > 1; }

    void read_settings(FileReader& file) {
        if (file.number<int32_t>() != 793712314) refuse("it does not begin with the number of such files");
        const auto version = file.number<int32_t>();
        if (version < 11 || version > 12) refuse("it has another version than 11 or 12");
        columns_ = file.number<int32_t>();
        file.take(4 * 4);  // window, epochs, least count of a word, negatives
        max_words_ = file.number<int32_t>();
        loss_ = file.number<int32_t>();
        if (file.number<int32_t>() != SUPERVISED) refuse("it is a model of words, which has no labels");
        if (loss_ < HIERARCHICAL_SOFTMAX || loss_ > ONE_VS_ALL) refuse("it has an unknown loss");
        buckets_ = file.number<int32_t>();
        min_chars_ = file.number<int32_t>(), max_chars_ = file.number<int32_t>();
        if (version == 11) max_chars_ = 0;
        file.take(4 + 8);  // rate of updates, threshold of sampling
        // Long n-grams would take the square of the length of a text; usual ones have up to 6.
        if (columns_ < 1 || columns_ > 100000 || buckets_ < 0 || (has_ngrams() && !buckets_) || max_words_ > MAX_NGRAM ||
            max_chars_ > MAX_NGRAM)
            refuse("its settings are out of range");
        sums_.resize(static_cast<size_t>(columns_));
    }

    void read_words(FileReader& file) {
        const auto size = file.number<int32_t>();
        num_words_ = file.number<int32_t>();
        const auto num_labels = file.number<int32_t>();
        file.take(8);  // tokens
        const auto pruned = file.number<int64_t>();
        if (num_words_ < 0 || num_labels < 1 || size != int64_t{num_words_} + num_labels)
            refuse("its numbers of words and labels are invalid");
        int64_t total = 0;
        for (int32_t at = 0; at < size; ++at) {
            const auto word = file.text();
            const auto count = file.number<int64_t>();
            const bool is_label = file.number<uint8_t>() != 0;
            if (is_label != (at >= num_words_)) refuse("its words are not followed by its labels");
            words_[word] = at;
            if (!is_label) continue;
            if (count < 1 || count >= MAX_COUNT - total) refuse("a label has an invalid count");
            total += count, labels_.push_back(word), counts_.push_back(count);
        }
        is_pruned_ = pruned >= 0;
        if (is_pruned_) kept_.read(file, pruned, buckets_);
    }

    // The Huffman tree over the labels, which are ordered by falling counts.
    void build_tree() {
        const int32_t size = num_labels();
        nodes_.resize(static_cast<size_t>(2 * size - 1));
        for (int32_t at = 0; at < size; ++at) {
            nodes_[at].count = counts_[at];
            if (at && counts_[at] > counts_[at - 1]) refuse("its labels are not ordered by their counts");
        }
        int32_t leaf = size - 1, node = size;
        for (int32_t at = size; at < 2 * size - 1; ++at) {
            int32_t least[2];
            for (int32_t& child : least) child = leaf >= 0 && nodes_[leaf].count < nodes_[node].count ? leaf-- : node++;
            nodes_[at] = {least[0], least[1], nodes_[least[0]].count + nodes_[least[1]].count};
        }
    }

    static constexpr uint32_t NO_SIGNS = 2166136261u;  // the hash of an empty text

    static uint32_t hash(std::string_view text, uint32_t code = NO_SIGNS) {
        for (const char sign : text) code = (code ^ static_cast<uint32_t>(static_cast<int8_t>(sign))) * 16777619u;
        return code;
    }

    static bool is_space(char sign) { return sign == ' ' || (sign >= '\t' && sign <= '\r') || sign == '\0'; }
    static bool continues(char sign) { return (sign & 0xC0) == 0x80; }

    void add_row(int64_t row) { input_.add(row, sums_.data()), ++num_vectors_; }

    void add_bucket(uint32_t bucket) {
        if (!is_pruned_) {
            add_row(int64_t{num_words_} + bucket);
        } else if (const int32_t number = kept_.number_of(static_cast<int32_t>(bucket)); number >= 0) {
            add_row(int64_t{num_words_} + number);
        }
    }

    // Sums up the vectors of the words of a line, of their n-grams of characters, and of n-grams of words.
    void read_line(std::string_view line) {
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        num_vectors_ = 0;
        hashes_.clear();
        for (size_t at = 0; at < line.size();) {
            if (is_space(line[at])) {
                ++at;
                continue;
            }
            const size_t start = at;
            while (at < line.size() && !is_space(line[at])) ++at;
            const auto word = line.substr(start, at - start);
            add_word(word);
            if (word == END_OF_LINE) return add_word_ngrams();
        }
        add_word(END_OF_LINE);
        add_word_ngrams();
    }

    void add_word(std::string_view word) {
        const auto found = words_.find(word);
        const bool is_known = found != words_.end();
        if (is_known ? found->second >= num_words_ : word.substr(0, LABEL.size()) == LABEL) return;
        if (is_known) add_row(found->second);
        if (word != END_OF_LINE && max_chars_ > 0) add_subwords(word);
        if (max_words_ > 1) hashes_.push_back(static_cast<int32_t>(hash(word)));
    }

    void add_subwords(std::string_view word) {
        marked_.assign(1, '<').append(word).push_back('>');
        const size_t size = marked_.size();
        for (size_t start = 0; start < size; ++start) {
            if (continues(marked_[start])) continue;
            uint32_t code = NO_SIGNS;
            size_t end = start;
            for (int32_t chars = 1; end < size && chars <= max_chars_; ++chars) {
                const size_t first = end++;
                while (end < size && continues(marked_[end])) ++end;
                code = hash({marked_.data() + first, end - first}, code);
                if (chars >= min_chars_ && !(chars == 1 && (start == 0 || end == size)))
                    add_bucket(code % static_cast<uint32_t>(buckets_));
            }
        }
    }

    void add_word_ngrams() {
        const auto size = static_cast<int64_t>(hashes_.size());
        for (int64_t first = 0; first < size; ++first) {
            auto code = static_cast<uint64_t>(int64_t{hashes_[first]});
            for (int64_t at = first + 1; at < size && at < first + max_words_; ++at) {
                code = code * 116049371 + static_cast<uint64_t>(int64_t{hashes_[at]});
                add_bucket(static_cast<uint32_t>(code % static_cast<uint64_t>(buckets_)));
            }
        }
    }

    float product(int64_t row) const {
        const float value = output_.product(row, sums_.data());
        if (std::isnan(value)) {
            PyErr_SetString(PyExc_RuntimeError, "fastText: expected numbers, got a NaN. Use another model.");
            throw PythonError();
        }
        return value;
    }

    static void keep(float score, int32_t label, size_t most, std::vector<Prediction>& found) {
        found.emplace_back(score, label);
        std::push_heap(found.begin(), found.end(), more_probable);
        if (found.size() <= most) return;
        std::pop_heap(found.begin(), found.end(), more_probable);
        found.pop_back();
    }

    void by_shares(size_t most, std::vector<Prediction>& found) {
        std::vector<float> shares(labels_.size());
        for (size_t at = 0; at < shares.size(); ++at) shares[at] = product(static_cast<int64_t>(at));
        if (loss_ == SOFTMAX) {
            const float largest = *std::max_element(shares.begin(), shares.end());
            float total = 0;
            for (float& share : shares) {
                share = static_cast<float>(std::exp(double{share - largest}));
                total += share;
            }
            for (float& share : shares) share /= total;
        } else {
            for (float& share : shares) share = sigmoid(share);
        }
        for (size_t at = 0; at < shares.size(); ++at) {
            const float score = log_of(shares[at]);
            if (found.size() == most && score < found.front().first) continue;
            keep(score, static_cast<int32_t>(at), most, found);
        }
    }

    // The logistic function as fastText has it: of the next lower multiple of 1/32.
    static float sigmoid(float value) {
        if (value < -8 || value > 8) return value < 0 ? 0.0f : 1.0f;
        const auto place = static_cast<int64_t>((value + 8) * 512 / 8 / 2);
        const float rounded = static_cast<float>(place * 2 * 8) / 512 - 8;
        return static_cast<float>(1.0 / (1.0 + std::exp(-rounded)));
    }

    float right_share(int32_t node) const {
        return static_cast<float>(1.0 / (1 + std::exp(-product(node - num_labels()))));
    }

    // Returns the score of the leaf to which the larger share leads from every node.
    float greedy(int32_t node) const {
        float score = 0;
        while (nodes_[node].left >= 0) {
            const float right = right_share(node);
            score += right < 0.5f ? log_of(static_cast<float>(1.0 - right)) : log_of(right);
            node = right < 0.5f ? nodes_[node].left : nodes_[node].right;
        }
        return score;
    }

    // `least`: score below which no leaf can be among the results.
    void descend(int32_t node, float score, size_t most, float least, std::vector<Prediction>& found) {
        if (score < least || (found.size() == most && score < found.front().first)) return;
        if (nodes_[node].left < 0) return keep(score, node, most, found);
        const float right = right_share(node);
        descend(nodes_[node].left, score + log_of(static_cast<float>(1.0 - right)), most, least, found);
        descend(nodes_[node].right, score + log_of(right), most, least, found);
    }

    PyObject* data_;
    int32_t columns_ = 0, max_words_ = 1, loss_ = 0, buckets_ = 0, min_chars_ = 0, max_chars_ = 0, num_words_ = 0;
    bool is_pruned_ = false;
    std::unordered_map<std::string_view, int32_t> words_;
    std::vector<std::string_view> labels_;
    std::vector<int64_t> counts_;
    KeptBuckets kept_;
    Matrix input_, output_;
    std::vector<Node> nodes_;
    std::vector<float> sums_;
    int64_t num_vectors_ = 0;
    std::vector<int32_t> hashes_;
    std::string marked_;
};

}  // namespace fasttext
