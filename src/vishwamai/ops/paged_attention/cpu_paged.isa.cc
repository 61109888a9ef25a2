// Attention of ragged runs of queries over keys and values in pages: bound, when decoding, by reading them once.
//
// A block of one sequence's queries walks the tokens that it sees, all kv heads of a few tokens together, so that
// memory is read in the order in which it lies. Long sequences are split between tasks, and the parts joined by their
// maxima and sums (Flash-Decoding; Dao et al., 2023).
#include <cmath>

#include "cpu_paged.h"
#include "vishwamai/core/cpp/cache_products.h"

namespace vishwamai::VISHWAMAI_ISA {
namespace {

constexpr int64_t kQueryRows = 64;        // rows of a kv head that a block of queries has at most
constexpr int64_t kPartCost = 256 << 10;  // bytes (or as much arithmetic) that make a part worth a task of its own

// A block of queries, and the keys that any of them sees.
struct Item {
  int64_t batch, sequence, token, queries;
  int64_t position;   // of the first query
  int64_t first_new;  // of the sequence's first new token
  int64_t begin, end, parts;
  int64_t first_task, result;  // result: where the parts' sums begin, in elements
};

// What is the same for all types of pages that are computed in T.
template <class T>
struct Sequences {
  static constexpr int W = lanes<T>;
  static constexpr T kNone = static_cast<T>(-__builtin_inff());

  const PagedArgs& a;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t block = greatest<int64_t>(1, kQueryRows / group);
  const int64_t out_stride = round_up<int64_t>(a.value_dim, W);
  const int64_t part_stride = out_stride + 16;  // a row of a part: output sums, then m and l

  int64_t part_size(const Item& item) const { return item.queries * a.heads * part_stride; }

  // f(item) for every block of queries that there is.
  template <class F>
  void items(F&& f) const {
    for (int64_t b = 0; b < a.batch; ++b) {
      const int32_t *lens = a.kv_lens + b * a.kv_lens_stride, *starts = a.starts + b * a.starts_stride;
      const int64_t sequences = least<int64_t>(a.sequences, a.count[b * a.count_stride]);
      for (int64_t s = 0; s < sequences; ++s) {
        const int64_t first = least<int64_t>(greatest(0, starts[s]), a.tokens), last = least<int64_t>(starts[s + 1], a.tokens);
        const int64_t keys = least<int64_t>(lens[s], a.entries * a.page_size);
        for (int64_t i = first; i < last; i += block) {
          Item item{};
          item.batch = b, item.sequence = s, item.token = i;
          item.queries = least(block, last - i);
          item.position = lens[s] - last + i;
          item.first_new = lens[s] - (last - first);
          item.end = greatest<int64_t>(0, least(keys, item.position + item.queries));
          const int64_t lowest = a.window < 0 ? 0 : greatest<int64_t>(0, item.position - a.window);
          item.begin = least(item.end, lowest);
          f(item);
        }
      }
    }
  }

  template <class Products>
  void load_query(const Item& item, const Products& products, typename Products::Query* query) const {
    for (int64_t h = 0; h < a.kv_heads; ++h, query += products.query_elements()) {
      for (int64_t i = 0; i < item.queries; ++i)
        for (int64_t g = 0; g < group; ++g) {
          const int64_t from = (((item.batch * a.tokens + item.token + i) * a.heads) + h * group + g) * a.dim;
          auto copy = [&](auto s) {
            if constexpr (std::is_same_v<compute_t<decltype(s)>, T>) {
              products.load_query(static_cast<const decltype(s)*>(a.query) + from, i * group + g, query);
            }
          };
          for_storage(a.storage, copy);
        }
      products.finish_query(query);
    }
  }

  // Where a row stands among the keys of a block.
  struct Row {
    int first, last;  // keys that its position and the window leave
    T slope, distance;  // of ALiBi, and the row's position minus that of the block's first key
    const uint8_t* tree;  // of each key of the block, whether the row sees it; null for all
  };

  // Products of a block of keys to probabilities relative to the row's running maximum, 0 for keys that it does not
  // see; rescales what was summed before. `scale` is of the logits of each key.
  void soften(T* s, const Row& row, const T* scale, T* state) const {
    const auto [first, last, slope, distance, tree] = row;
    if (first >= last) {
      memset(s, 0, sizeof(T) * kBlock);
      return;
    }
    T &m = state[out_stride], &l = state[out_stride + 1];
    const T cap = static_cast<T>(a.softcap);
    V<T> top = splat(kNone);
    for (int i = 0; i < kBlock; i += W) {
      V<T> x = load(s + i) * load(scale + i);
      if (cap != 0) x = tanh<T>(x / cap) * cap;
      if (slope != 0) x -= slope * (distance - numbers(i));
      if (tree != nullptr) x = load_bools<T>(tree + i) ? x : splat(kNone);
      if (i < first || i + W > last) {
        const Mask<T> index = iota_mask() + static_cast<int>(i);
        x = (index >= first) & (index < last) ? x : splat(kNone);
      }
      store(s + i, x);
      top = maximum(top, x);
    }
    const T highest = max_lanes<T>(top);
    if (highest > m) {
      const T shrink = m == kNone ? T(0) : exp(splat(m - highest))[0];
      for (int64_t d = 0; d < out_stride; d += W) store(state + d, load(state + d) * shrink);
      l *= shrink;
      m = highest;
    }
    const V<T> shift = splat(m == kNone ? T(0) : m);
    V<T> sum = {};
    for (int i = 0; i < kBlock; i += W) {
      const V<T> x = exp(load(s + i) - shift);
      sum += x;
      store(s + i, x);
    }
    l += sum_lanes<T>(sum);
  }
  // first, first + 1, ...
  static VISHWAMAI_INLINE V<T> numbers(int first) {
    V<T> found;
    for (int i = 0; i < W; ++i) found[i] = static_cast<T>(first + i);
    return found;
  }
  static VISHWAMAI_INLINE Mask<T> iota_mask() {
    Mask<T> index;
    for (int i = 0; i < W; ++i) index[i] = i;
    return index;
  }

  // Joins the parts of every row, with its sink, and writes the output; `unit`: what 1 of a value stands for.
  void join(const Item& item, const T* parts, T unit) const {
    const int64_t size = part_size(item), rows = item.queries * group;
    for (int64_t h = 0; h < a.kv_heads; ++h)
      for (int64_t r = 0; r < rows; ++r) {
        const T* row = parts + (h * rows + r) * part_stride;
        const int64_t head = h * group + r % group;
        const T sink = a.sinks ? static_cast<const T*>(a.sinks)[item.batch * a.sinks_stride + head] : kNone;
        T m = sink;
        for (int64_t i = 0; i < item.parts; ++i) m = greatest(m, row[i * size + out_stride]);
        auto weight = [&](T of) { return of == kNone ? T(0) : exp(splat(of - m))[0]; };
        T l = weight(sink);
        for (int64_t i = 0; i < item.parts; ++i) l += weight(row[i * size + out_stride]) * row[i * size + out_stride + 1];
        const T scale = a.value_scale && !a.token_scales ? a.value_scale[item.batch * a.value_scale_stride + h] : 1.0f;
        const T inverse = l == 0 ? T(0) : unit * scale / l;
        const int64_t at = (item.batch * a.tokens + item.token + r / group) * a.heads + head, to = at * a.value_dim;
        if (a.lse != nullptr) static_cast<T*>(a.lse)[at] = l == 0 ? kNone : m + std::log(l);
        auto write = [&](auto s) {
          if constexpr (std::is_same_v<compute_t<decltype(s)>, T>) {
            auto* out = static_cast<decltype(s)*>(a.out) + to;
            for (int64_t d = 0; d < a.value_dim; d += W) {
              V<T> sum = {};
              for (int64_t i = 0; i < item.parts; ++i) sum += load(row + i * size + d) * weight(row[i * size + out_stride]);
              store(out + d, sum * inverse, static_cast<int>(least<int64_t>(W, a.value_dim - d)));
            }
          }
        };
        for_storage(a.storage, write);
      }
  }

  // part(*this, item, begin, end, sums) does keys [begin, end) of an item; a number of a page has `bytes`, and 1 of it
  // stands for `unit`.
  using Part = void (*)(const Sequences&, const Item&, int64_t begin, int64_t end, T* sums);
  void run(Part part, int64_t bytes, T unit, const Threads& threads) const {
    int64_t number = 0, keys = 0;
    items([&](const Item& item) { ++number, keys += item.end - item.begin; });
    if (number == 0) return;
    // A part: enough of the sequence to be worth it, and a few parts for every thread where there is so much.
    const int64_t rows = least(block, a.tokens) * group;
    const int64_t cost = a.kv_heads * (a.dim + a.value_dim) * (bytes + rows / 4);
    const int64_t wanted = greatest(ceil_div<int64_t>(keys, 4 * threads.count), kPartCost / greatest<int64_t>(1, cost));
    const int64_t each = round_up<int64_t>(greatest<int64_t>(1, wanted), kBlock);
    Scratch list(Scratch::size<Item>(number));
    Item* all = list.take<Item>(number);
    int64_t tasks = 0, sums = 0, at = 0;
    items([&](Item& item) {
      item.parts = greatest<int64_t>(1, ceil_div(item.end - item.begin, each));
      item.first_task = tasks, item.result = sums;
      tasks += item.parts;
      if (item.parts > 1) sums += item.parts * part_size(item);
      all[at++] = item;
    });
    Scratch scratch(Scratch::size<T>(greatest<int64_t>(1, sums)) + Scratch::size<int64_t>(tasks));
    T* results = scratch.take<T>(greatest<int64_t>(1, sums));
    int64_t* owner = scratch.take<int64_t>(tasks);
    for (int64_t i = 0; i < number; ++i)
      for (int64_t t = 0; t < all[i].parts; ++t) owner[all[i].first_task + t] = i;
    parallel_for(threads, tasks, [&](int64_t task) {
      const Item& item = all[owner[task]];
      const int64_t index = task - item.first_task, begin = item.begin + index * each, end = least(item.end, begin + each);
      if (item.parts > 1) return part(*this, item, begin, end, results + item.result + index * part_size(item));
      Scratch own(Scratch::size<T>(part_size(item)));
      T* result = own.take<T>(part_size(item));
      part(*this, item, begin, end, result);
      join(item, result, unit);
    });
    if (sums == 0) return;
    parallel_for(threads, number, [&](int64_t i) {
      if (all[i].parts > 1) join(all[i], results + all[i].result, unit);
    });
  }
};

// The places in the pool, and the addresses, of n tokens of the item's sequence from k on.
template <class S>
void find(const PagedArgs& a, const Item& item, int64_t k, int n, int64_t* places, BlockRows<S>& keys, BlockRows<S>& values) {
  const int32_t* table = a.table + item.batch * a.table_stride + item.sequence * a.entries;
  const S* key_pool = static_cast<const S*>(a.keys.data) + item.batch * a.keys.stride;
  const S* value_pool = static_cast<const S*>(a.values.data) + item.batch * a.values.stride;
  int64_t entry = k / a.page_size, row = k % a.page_size;
  for (int j = 0; j < n; ++j) {
    // An index out of range is the caller's mistake; it must not read what is not ours.
    const int64_t page = least<int64_t>(a.pages - 1, greatest<int64_t>(0, table[entry])), at = page * a.page_size + row;
    places[j] = at;
    keys.at[j] = key_pool + at * a.keys.token;
    values.at[j] = value_pool + at * a.values.token;
    if (++row == a.page_size) ++entry, row = 0;
  }
  keys.settle(n), values.settle(n);
}

// factors[j] = unit times the scale of head h of the token in place j, for n tokens and 0 behind them; false where 1 is
// the scale of all.
template <class T>
bool token_factors(const PagedArgs& a, const float* scale, int64_t stride, const Item& item, int64_t h, const int64_t* places, int n, T unit,
                   T* factors) {
  if (scale == nullptr || !a.token_scales) return false;
  const float* of_head = scale + item.batch * stride + h;
  for (int j = 0; j < n; ++j) factors[j] = unit * static_cast<T>(of_head[places[j] * a.kv_heads]);
  for (int j = n; j < kBlock; ++j) factors[j] = 0;
  return true;
}

// Of the keys from k0 on, whether the tree lets query `row` of the item see them; false where it says nothing of them.
inline bool tree_keys(const PagedArgs& a, const Item& item, int64_t row, int64_t k0, uint8_t* seen) {
  const int64_t new_keys = k0 - item.first_new;  // the new token that the block's first key is
  if (new_keys + kBlock <= 0 || new_keys >= a.tree_columns) return false;
  const uint8_t* mask = a.tree + item.batch * a.tree_stride + (item.token + row) * a.tree_columns;
  for (int64_t i = 0; i < kBlock; ++i) {
    const int64_t column = new_keys + i;
    seen[i] = column < 0 || column >= a.tree_columns ? 1 : mask[column];
  }
  return true;
}

// Keys [begin, end) for every row of the item; writes part_size(item) sums, in the order kv head, query, head of the
// group.
template <class S, class T = compute_t<S>>
void part(const Sequences<T>& of, const Item& item, int64_t begin, int64_t end, T* result) {
  using Products = CacheProducts<S>;
  using Query = typename Products::Query;
  const PagedArgs& a = of.a;
  const int64_t rows = item.queries * of.group, part_stride = of.part_stride;
  typename Products::Scope scope;
  (void)scope;
  Products products(a.dim, a.value_dim, rows, a.storage == Storage::bf16);
  Scratch scratch(Scratch::size<Query>(a.kv_heads * products.query_elements()) + Scratch::size<T>(rows * kBlock) + products.scratch_bytes());
  Query* query = scratch.take<Query>(a.kv_heads * products.query_elements());
  T* p = scratch.take<T>(rows * kBlock);
  products.take(scratch);
  of.load_query(item, products, query);
  for (int64_t r = 0; r < a.kv_heads * rows; ++r) {
    memset(result + r * part_stride, 0, sizeof(T) * static_cast<size_t>(part_stride));
    result[r * part_stride + of.out_stride] = Sequences<T>::kNone;
  }
  const T* slopes = a.slopes == nullptr ? nullptr : static_cast<const T*>(a.slopes) + item.batch * a.slopes_stride;
  BlockRows<S> keys, values;
  int64_t places[kBlock];
  alignas(64) T scale[kBlock], value_scale[kBlock];
  for (int64_t k0 = begin; k0 < end; k0 += kBlock) {
    const int n = static_cast<int>(least<int64_t>(kBlock, end - k0));
    find(a, item, k0, n, places, keys, values);
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      // The same tokens' next head meanwhile; tiles take so little time that asking costs more than it saves
      // (docs/notes/paged_attention.md).
      const bool asking = !Products::kTiles && h + 1 < a.kv_heads;
      Ahead ahead(keys, (h + 1) * a.keys.head, a.dim, values, (h + 1) * a.values.head, a.value_dim, asking ? n : 0);
      T* head_result = result + h * rows * part_stride;
      products.scores(keys, h * a.keys.head, n, query + h * products.query_elements(), p, ahead);
      const T unit = static_cast<T>(a.scale) * kLoadUnit<S>;
      if (!token_factors(a, a.key_scale, a.key_scale_stride, item, h, places, n, unit, scale)) {
        const T of_head = a.key_scale && !a.token_scales ? a.key_scale[item.batch * a.key_scale_stride + h] : 1.0f;
        for (int i = 0; i < kBlock; i += Sequences<T>::W) store(scale + i, splat(of_head * unit));
      }
      const bool weighs = token_factors(a, a.value_scale, a.value_scale_stride, item, h, places, n, T(1), value_scale);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t position = item.position + r / of.group;
        const int64_t lowest = a.window < 0 ? 0 : position - a.window;
        typename Sequences<T>::Row row{};
        row.first = static_cast<int>(greatest<int64_t>(0, least<int64_t>(n, lowest - k0)));
        row.last = static_cast<int>(greatest<int64_t>(0, least<int64_t>(n, position + 1 - k0)));
        if (slopes != nullptr) row.slope = slopes[h * of.group + r % of.group], row.distance = static_cast<T>(position - k0);
        uint8_t seen[kBlock];
        if (a.tree != nullptr && tree_keys(a, item, r / of.group, k0, seen)) row.tree = seen;
        of.soften(p + r * kBlock, row, scale, head_result + r * part_stride);
        for (int i = 0; weighs && i < kBlock; i += Sequences<T>::W) {
          T* weights = p + r * kBlock + i;
          store(weights, load(weights) * load(value_scale + i));
        }
      }
      products.add(values, h * a.values.head, n, p, head_result, part_stride, ahead);
    }
  }
}

template <class S>
void run(const PagedArgs& a, const Threads& threads) {
  using T = compute_t<S>;
  Sequences<T>{a}.run(&part<S, T>, static_cast<int64_t>(sizeof(S)), static_cast<T>(kLoadUnit<S>), threads);
}

}  // namespace

void paged_attention(const PagedArgs& a, const Threads& threads) {
  switch (a.page_type) {
    case PageType::f32: return VISHWAMAI_BASE_OR(paged_attention(a, threads), run<float>(a, threads));
    case PageType::bf16: return run<bf16>(a, threads);
    case PageType::f16: return VISHWAMAI_BASE_OR(paged_attention(a, threads), run<f16>(a, threads));
    case PageType::f64: return VISHWAMAI_FLOAT64_OR(paged_attention(a, threads), run<double>(a, threads));
    case PageType::s8: return VISHWAMAI_BASE_OR(paged_attention(a, threads), run<int8_t>(a, threads));
    case PageType::f8e4m3: return VISHWAMAI_BASE_OR(paged_attention(a, threads), run<f8e4m3>(a, threads));
    case PageType::s4: return VISHWAMAI_BASE_OR(paged_attention(a, threads), run<s4x2>(a, threads));
    case PageType::f8e5m2: return VISHWAMAI_BASE_OR(paged_attention(a, threads), run<f8e5m2>(a, threads));
  }
}

}  // namespace vishwamai::VISHWAMAI_ISA
