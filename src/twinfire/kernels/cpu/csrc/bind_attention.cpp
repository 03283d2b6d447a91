// Attention by itself, for tests and benchmarks; a program calls the kernels directly.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "bind_arrays.h"
#include "bindings.h"
#include "thread_team.h"

namespace tf {

namespace nb = nanobind;

namespace {

struct FreeBytes {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};

class EagerAttention final : public TileRunner {
 public:
  EagerAttention(std::shared_ptr<ThreadTeam> team, Isa isa, const HeadShape& shape, KvFormat format)
      : team_(std::move(team)), kernels_(TF_FOR_ISA(isa, kAttentionKernels)), plan_(shape) {
    const size_t bytes = (kernels_.scratch_bytes(shape, format) + 63) / 64 * 64;
    for (int thread = 0; thread < team_->num_threads(); ++thread)
      scratch_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, bytes)));
  }

  // The same rows in one layer after the other, over one plan.
  void run(const AttentionStep& step, int window, int num_tokens, std::vector<KvLayer> layers,
           AttentionArgs args) {
    plan_.build(step, window, team_->num_threads());
    args_ = args;
    args_.plan = &plan_;
    num_tokens_ = num_tokens;
    layers_ = std::move(layers);
    std::vector<int> phases;
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      if (!plan_.writes_kv()) phases.push_back(kernels_.num_write_tiles(write_args(layer)));
      phases.push_back(plan_.num_tiles());
    }
    team_->run(phases, *this);
  }

  void run_tile(int phase, int tile, int thread) override {
    const size_t layer = size_t(plan_.writes_kv() ? phase : phase / 2);
    if (!plan_.writes_kv() && phase % 2 == 0) return kernels_.write_kv(write_args(layer), tile);
    AttentionArgs args = args_;
    args.kv = layers_[layer];
    const int next_tile = tile + team_->num_threads();
    args.next_tile = next_tile < plan_.num_tiles() ? next_tile : -1;
    kernels_.attend(args, tile, scratch_[size_t(thread)].get());
  }

 private:
  KvWriteArgs write_args(size_t layer) const {
    return {args_.heads, layers_[layer], args_.slots, &plan_, num_tokens_};
  }

  std::shared_ptr<ThreadTeam> team_;
  const AttentionKernels& kernels_;
  AttentionPlan plan_;
  std::vector<std::unique_ptr<std::byte, FreeBytes>> scratch_;
  AttentionArgs args_{};
  int num_tokens_ = 0;
  std::vector<KvLayer> layers_;
};

HeadShape checked_shape(const KvShape& kv, int num_heads) {
  require(num_heads > 0 && num_heads % kv.num_kv_heads == 0,
          "query heads must be a multiple of KV heads");
  return {num_heads, kv.num_kv_heads, kv.head_dim};
}

class BoundAttention {
 public:
  BoundAttention(std::shared_ptr<ThreadTeam> team, std::string_view isa,
                 std::shared_ptr<KvCache> cache, int num_heads)
      : cache_(std::move(cache)),
        shape_(checked_shape(cache_->shape(), num_heads)),
        eager_(std::move(team), parse_isa(isa), shape_, cache_->shape().format) {}

  nb::object run(const std::vector<int>& layers, ConstMatrix<float> fused, ConstVector<int32_t> slots,
                 ConstVector<int32_t> query_starts, ConstVector<int32_t> context_lens,
                 ConstMatrix<int32_t> block_tables, float scale, int window,
                 std::optional<ConstVector<float>> query_norm,
                 std::optional<ConstVector<float>> key_norm, float norm_eps,
                 std::optional<ConstMatrix<float>> rope_factors, bool as_bf16) {
    const size_t num_tokens = fused.shape(0), dim = size_t(shape_.head_dim);
    std::vector<KvLayer> kv;
    for (int layer : layers) {
      require(layer >= 0 && layer < cache_->shape().num_layers, "no such layer");
      kv.push_back(cache_->layer(layer));
    }
    require(!kv.empty(), "no layer");
    require(num_tokens > 0 && fused.shape(1) == size_t(shape_.fused_width()), "fused rows");
    require(slots.shape(0) == num_tokens, "one slot for each row");
    require(query_starts.shape(0) == context_lens.shape(0) + 1 &&
                block_tables.shape(0) == context_lens.shape(0),
            "arrays of different numbers of sequences");
    require(!query_norm || query_norm->shape(0) == dim, "a norm's width");
    require(!key_norm || key_norm->shape(0) == dim, "a norm's width");
    if (rope_factors)
      require(rope_factors->shape(0) == num_tokens && rope_factors->shape(1) == dim,
              "factors for each row");
    const AttentionStep step{int(context_lens.shape(0)), query_starts.data(), context_lens.data(),
                             block_tables.data(), int(block_tables.shape(1))};
    const HeadRows heads{shape_,
                         fused.data(),
                         query_norm ? query_norm->data() : nullptr,
                         key_norm ? key_norm->data() : nullptr,
                         norm_eps,
                         rope_factors ? rope_factors->data() : nullptr};
    const RowFormat format = as_bf16 ? RowFormat::bf16 : RowFormat::f32;
    const size_t width = size_t(shape_.query_width());
    const size_t row_bytes = as_bf16 ? (width + 31) / 32 * 64 : width * sizeof(float);
    Array<uint8_t> out = new_array<uint8_t>({num_tokens, row_bytes});
    const AttentionArgs args{heads,  {},        slots.data(),
                             nullptr, scale,     format,
                             reinterpret_cast<std::byte*>(out.data()), row_bytes};
    {
      const nb::gil_scoped_release released;
      eager_.run(step, window, int(num_tokens), std::move(kv), args);
    }
    return nb::cast(out);
  }

 private:
  std::shared_ptr<KvCache> cache_;
  HeadShape shape_;
  EagerAttention eager_;
};

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<BoundAttention>(module, "Attention")
      .def(nb::init<std::shared_ptr<ThreadTeam>, std::string_view, std::shared_ptr<KvCache>,
                    int>(),
           nb::arg("team"), nb::arg("isa"), nb::arg("cache"), nb::arg("num_heads"))
      .def("__call__", &BoundAttention::run, nb::arg("layers"), nb::arg("fused"), nb::arg("slots"),
           nb::arg("query_starts"), nb::arg("context_lens"), nb::arg("block_tables"),
           nb::kw_only(), nb::arg("scale"), nb::arg("window") = 0,
           nb::arg("query_norm") = nb::none(), nb::arg("key_norm") = nb::none(),
           nb::arg("norm_eps") = 0.0f, nb::arg("rope_factors") = nb::none(),
           nb::arg("as_bf16") = false);
}

}  // namespace tf
