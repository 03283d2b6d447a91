// Programs for Python: building one from nodes, and replaying it over numpy's arrays.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "bind_arrays.h"
#include "bindings.h"
#include "format_names.h"
#include "kept_rows.h"
#include "program.h"

namespace tf {

namespace nb = nanobind;

namespace {

using Ids = ConstVector<int32_t>;
using IdRows = ConstMatrix<int32_t>;
using Heads = std::tuple<int, int, int>;

HeadShape head_shape(const Heads& heads) {
  const auto [num_heads, num_kv_heads, head_dim] = heads;
  return {num_heads, num_kv_heads, head_dim};
}

bool all_within(const int32_t* values, size_t count, int64_t end) {
  for (size_t index = 0; index < count; ++index)
    if (values[index] < 0 || values[index] >= end) return false;
  return true;
}

// A program and what it must not outlive.
class BoundProgram {
 public:
  BoundProgram(std::shared_ptr<ThreadTeam> team, std::string_view isa, int vocab_size)
      : program_(parse_isa(isa), std::move(team)), vocab_size_(vocab_size) {}

  int add_buffer(std::string_view format, int width, bool per_logit_row) {
    return program_.add_buffer(parse<RowFormat>(kRowFormats, format), width, per_logit_row);
  }
  void add_embed_packed(const PackedMatrix& table, int out) {
    release();
    require(table.n >= vocab_size_, "the table has fewer rows than the vocabulary");
    program_.add(std::make_unique<EmbedNode>(table, buffer(out)));
  }
  void add_embed_plain(ConstVector<uint8_t> table, std::string_view format_name, int out) {
    release();
    const auto format = parse<TableFormat>(kTableFormats, format_name);
    const size_t value_bytes = format == TableFormat::f32 ? 4 : 2;
    const size_t width = size_t(program_.context().buffers[size_t(buffer(out))].width);
    require(table.size() == size_t(vocab_size_) * width * value_bytes,
            "the table does not have the vocabulary's size");
    program_.add(std::make_unique<EmbedNode>(table.data(), format, out));
  }
  // Held back until it is known who reads the rows.
  void add_norm(int in, std::vector<float> weight, float eps, int out) {
    hold(std::make_unique<NormNode>(buffer(in), std::move(weight), eps, buffer(out)));
  }
  void add_convert(int in, int out) {
    hold(std::make_unique<ConvertNode>(buffer(in), buffer(out)));
  }
  // Buffer (-1: kept rows), first column of kept rows, width, weight of the norm (empty: none), eps.
  using Part = std::tuple<int, int, int, std::vector<float>, float>;
  void add_join(const std::vector<Part>& parts, std::shared_ptr<KeptRows> kept, int out) {
    std::vector<JoinedPart> joined;
    int width = 0;
    for (const auto& [in, column, part_width, weight, eps] : parts) {
      if (in < 0) {
        require(kept && 0 <= column && column + part_width <= kept->width(),
                "a part lies outside the kept rows");
        require(!read_rows_ || read_rows_ == kept, "a program reads one set of kept rows");
        read_rows_ = kept;
      } else {
        require(float_rows(in).width == part_width, "a part has another width than its buffer");
      }
      require(weight.empty() || weight.size() == size_t(part_width), "a norm has another width");
      width += part_width;
      joined.push_back({in, column, part_width, weight, eps});
    }
    require(program_.context().buffers[size_t(buffer(out))].width == width,
            "the parts do not fill the row");
    hold(std::make_unique<JoinNode>(std::move(joined), kept.get(), out));
  }
  void add_keep_rows(int in, std::shared_ptr<KeptRows> kept, int column) {
    release();
    require(0 <= column && column + float_rows(in).width <= kept->width(),
            "the rows do not fit the kept ones");
    program_.add_keep_rows(std::make_unique<KeepRowsNode>(in, kept.get(), column));
    written_rows_.push_back(std::move(kept));
  }
  void add_take_rows(int in, int out) {
    release();
    program_.add(std::make_unique<TakeRowsNode>(buffer(in), buffer(out)));
  }
  // `sole_reader`: nothing else reads the rows that the node before has made.
  void add_gemm(const PackedMatrix& matrix, int in, std::string_view epilogue_name, int out,
                bool sole_reader) {
    const auto epilogue = parse<Epilogue>(kEpilogues, epilogue_name);
    const Buffer& rows = program_.context().buffers[size_t(buffer(in))];
    require(rows.format == input_format(matrix.format) && rows.width == matrix.k,
            "the matrix reads rows of another format or width");
    require(program_.context().buffers[size_t(buffer(out))].width == matrix.out_columns(),
            "the matrix's result has another width than its buffer");
    auto node = std::make_unique<GemmNode>(matrix, in, epilogue, out);
    if (sole_reader && held_ && held_->out() == in) {
      program_.add(std::move(held_), std::move(node));
    } else {
      release();
      program_.add(std::move(node));
    }
  }
  void add_attention(Heads heads, int layer, int fused, std::vector<float> query_norm,
                     std::vector<float> key_norm, float norm_eps, std::optional<int> rope,
                     int window, float scale, int out) {
    release();
    const HeadShape shape = head_shape(heads);
    require(program_.context().buffers[size_t(buffer(fused))].width == shape.fused_width() &&
                program_.context().buffers[size_t(buffer(out))].width == shape.query_width(),
            "the heads do not fill the rows");
    const AttentionSpec spec{shape,
                             layer,
                             fused,
                             std::move(query_norm),
                             std::move(key_norm),
                             norm_eps,
                             rope.value_or(-1),
                             program_.plan(shape, window),
                             scale,
                             out};
    program_.add(std::make_unique<WriteKvNode>(spec));
    program_.add(std::make_unique<AttentionNode>(spec));
    num_layers_ = std::max(num_layers_, layer + 1);
  }
  int add_rope(std::vector<float> inv_freq, float attention_factor) {
    return program_.add_rope(std::move(inv_freq), attention_factor);
  }
  void set_head(const PackedMatrix& matrix, int hidden) {
    release();
    const Buffer& rows = program_.context().buffers[size_t(buffer(hidden))];
    require(rows.format == input_format(matrix.format) && rows.width == matrix.k,
            "the head does not fit its rows");
    program_.set_head(matrix, hidden);
    head_columns_ = int(matrix.n);
  }

  // The arrays of a StepBatch, in its order.
  using Arrays = std::tuple<Ids, Ids, Ids, Ids, Ids, IdRows, Ids, IdRows>;

  StepInputs checked(const Arrays& arrays, const KvCache& kv) {
    const auto& [token_ids, positions, slots, query_starts, context_lens, block_tables, logit_rows,
                 block_copies] = arrays;
    const size_t num_tokens = token_ids.size(), num_sequences = context_lens.size();
    require(positions.size() == num_tokens && slots.size() == num_tokens,
            "token ids, positions and slots differ in number");
    require(query_starts.size() == num_sequences + 1 && block_tables.shape(0) == num_sequences,
            "query starts, context lengths and block tables differ in number");
    require(block_copies.shape(1) == 2, "block copies are pairs");
    require(query_starts.data()[0] == 0 && query_starts.data()[num_sequences] == int(num_tokens),
            "the sequences do not cover the tokens");
    const int64_t num_blocks = kv.shape().num_blocks;
    require(kv.shape().num_layers >= num_layers_, "the KV cache has too few layers");
    require(all_within(token_ids.data(), num_tokens, vocab_size_), "a token id is none");
    require(all_within(positions.data(), num_tokens, INT32_MAX), "a position is negative");
    require(all_within(slots.data(), num_tokens, num_blocks * kBlockTokens), "a slot is none");
    require(all_within(block_tables.data(), block_tables.size(), num_blocks) &&
                all_within(block_copies.data(), block_copies.size(), num_blocks),
            "a block id is none");
    require(all_within(logit_rows.data(), logit_rows.size(), int64_t(num_tokens)),
            "a logit row is none of the step's tokens");
    for (size_t sequence = 0; sequence < num_sequences; ++sequence) {
      const int tokens = query_starts.data()[sequence + 1] - query_starts.data()[sequence];
      require(tokens > 0 && context_lens.data()[sequence] >= tokens &&
                  context_lens.data()[sequence] <= int64_t(block_tables.shape(1)) * kBlockTokens,
              "a sequence's tokens, context and blocks do not fit together");
    }
    num_logit_rows_ = int(logit_rows.size());
    return {int(num_tokens),
            int(num_sequences),
            int(block_tables.shape(1)),
            int(logit_rows.size()),
            int(block_copies.shape(0)),
            token_ids.data(),
            positions.data(),
            slots.data(),
            query_starts.data(),
            context_lens.data(),
            block_tables.data(),
            logit_rows.data(),
            block_copies.data()};
  }
  void run(const Arrays& arrays, KvCache& kv, bool one_by_one) {
    require(!read_rows_, "the program reads kept rows, which are not given");
    const StepInputs inputs = checked(arrays, kv);
    const nb::gil_scoped_release released;
    replay(inputs, kv, one_by_one);
  }
  void run_greedy(const Arrays& arrays, Ids kept_rows, KvCache& kv, Vector<int64_t> columns,
                  Vector<float> shares, bool one_by_one) {
    StepInputs inputs = checked(arrays, kv);
    require(head_columns_ > 0, "the program has no head");
    require(read_rows_ && kept_rows.size() == size_t(inputs.num_tokens),
            "kept rows and tokens differ in number");
    require(all_within(kept_rows.data(), kept_rows.size(), read_rows_->num_rows()),
            "a kept row is none of those of the step before");
    require(columns.size() == size_t(inputs.num_logit_rows) && columns.size() == shares.size(),
            "the outputs do not have the logit rows' number");
    inputs.kept_rows = kept_rows.data();
    const nb::gil_scoped_release released;
    replay(inputs, kv, one_by_one);
    program_.greedy(columns.data(), shares.data());
  }
  std::vector<std::pair<std::string, double>> profile(const Arrays& arrays, KvCache& kv) {
    return program_.profile(checked(arrays, kv), kv);
  }
  void logits(int start, int stop, Matrix<float> out) {
    require(0 <= start && start < stop && stop <= num_logit_rows_, "no such rows of logits");
    require(out.shape(0) == size_t(stop - start) && out.shape(1) == size_t(head_columns_),
            "the output does not have the logits' shape");
    const nb::gil_scoped_release released;
    program_.logits(start, stop, out.data());
  }
  const Program& program() const { return program_; }

 private:
  void replay(const StepInputs& inputs, KvCache& kv, bool one_by_one) {
    if (one_by_one)
      program_.run_one_by_one(inputs, kv);
    else
      program_.run(inputs, kv);
  }
  const Buffer& float_rows(int index) const {
    const Buffer& rows = program_.context().buffers[size_t(buffer(index))];
    require(rows.format == RowFormat::f32, "the rows are not float rows");
    return rows;
  }
  int buffer(int index) const {
    require(0 <= index && size_t(index) < program_.context().buffers.size(), "no such buffer");
    return index;
  }
  void hold(std::unique_ptr<RowNode> node) {
    release();
    held_ = std::move(node);
  }
  void release() {
    if (held_) program_.add(std::move(held_));
  }

  Program program_;
  int vocab_size_;
  int head_columns_ = 0;  // the vocabulary's size, or the width of an embedding
  int num_layers_ = 0;
  int num_logit_rows_ = 0;
  std::unique_ptr<RowNode> held_;
  std::shared_ptr<KeptRows> read_rows_;
  std::vector<std::shared_ptr<KeptRows>> written_rows_;
};

}  // namespace

void bind_program(nb::module_& module) {
  nb::class_<KeptRows>(module, "KeptRows")
      .def(nb::new_([](int width) {
             require(width > 0, "kept rows have a width of at least 1");
             return std::make_shared<KeptRows>(width);
           }),
           nb::arg("width"))
      .def_prop_ro("width", &KeptRows::width)
      .def_prop_ro("num_rows", &KeptRows::num_rows);
  nb::class_<BoundProgram>(module, "Program")
      .def(nb::init<std::shared_ptr<ThreadTeam>, std::string_view, int>(), nb::arg("team"),
           nb::arg("isa"), nb::arg("vocab_size"))
      .def("add_buffer", &BoundProgram::add_buffer, nb::arg("format"), nb::arg("width"),
           nb::arg("per_logit_row"))
      .def("add_rope", &BoundProgram::add_rope, nb::arg("inv_freq"), nb::arg("attention_factor"))
      .def("add_embed_packed", &BoundProgram::add_embed_packed, nb::arg("table"), nb::arg("out"),
           nb::keep_alive<1, 2>())
      .def("add_embed_plain", &BoundProgram::add_embed_plain, nb::arg("table"), nb::arg("format"),
           nb::arg("out"), nb::keep_alive<1, 2>())
      .def("add_norm", &BoundProgram::add_norm, nb::arg("rows"), nb::arg("weight"),
           nb::arg("eps"), nb::arg("out"))
      .def("add_convert", &BoundProgram::add_convert, nb::arg("rows"), nb::arg("out"))
      .def("add_join", &BoundProgram::add_join, nb::arg("parts"), nb::arg("kept").none(),
           nb::arg("out"))
      .def("add_keep_rows", &BoundProgram::add_keep_rows, nb::arg("rows"), nb::arg("kept"),
           nb::arg("column"))
      .def("add_take_rows", &BoundProgram::add_take_rows, nb::arg("rows"), nb::arg("out"))
      .def("add_gemm", &BoundProgram::add_gemm, nb::arg("matrix"), nb::arg("rows"),
           nb::arg("epilogue"), nb::arg("out"), nb::arg("sole_reader"), nb::keep_alive<1, 2>())
      .def("add_attention", &BoundProgram::add_attention, nb::arg("heads"), nb::arg("layer"),
           nb::arg("fused"), nb::arg("query_norm"), nb::arg("key_norm"), nb::arg("norm_eps"),
           nb::arg("rope").none(), nb::arg("window"), nb::arg("scale"), nb::arg("out"))
      .def("set_head", &BoundProgram::set_head, nb::arg("matrix"), nb::arg("hidden"),
           nb::keep_alive<1, 2>())
      .def("run", &BoundProgram::run, nb::arg("arrays"), nb::arg("kv"),
           nb::arg("one_by_one") = false)
      .def("run_greedy", &BoundProgram::run_greedy, nb::arg("arrays"), nb::arg("kept_rows"),
           nb::arg("kv"), nb::arg("columns"), nb::arg("shares"), nb::arg("one_by_one") = false)
      .def("profile", &BoundProgram::profile, nb::arg("arrays"), nb::arg("kv"))
      .def("logits", &BoundProgram::logits, nb::arg("start"), nb::arg("stop"), nb::arg("out"))
      .def_prop_ro("num_nodes", [](const BoundProgram& self) { return self.program().num_nodes(); })
      .def_prop_ro("num_phases",
                   [](const BoundProgram& self) { return self.program().num_phases(); })
      .def_prop_ro("buffer_bytes",
                   [](const BoundProgram& self) { return self.program().buffer_bytes(); });
}

}  // namespace tf
