#include "program_nodes.h"

#include <algorithm>

namespace tf {

int RowNode::num_tiles(const StepContext& context) const {
  return row_tiles(context.num_rows(out_));
}

void RowNode::run_tile(StepContext& context, int tile, ThreadScratch& scratch) const {
  const int first = tile * kTileRows;
  run_rows(context, first, std::min(first + kTileRows, context.num_rows(out_)), context.data(out_),
           scratch);
}

int EmbedNode::num_tiles(const StepContext& context) const {
  return row_tiles(context.num_rows(out_));
}

void EmbedNode::run_tile(StepContext& context, int tile, ThreadScratch&) const {
  const StepInputs& inputs = context.inputs;
  const int first = tile * kTileRows, end = std::min(first + kTileRows, inputs.num_tokens);
  const int width = context.buffers[size_t(out_)].width;
  float* const out = context.floats(out_);
  if (is_packed_) {
    for (int row = first; row < end; ++row)
      context.packing.row_to_f32(packed_, inputs.token_ids[row], out + size_t(row) * width);
  } else {
    const EmbedArgs args{plain_, plain_format_, inputs.token_ids, inputs.num_tokens, width, out};
    context.row_ops.embed(args, first, end);
  }
  for (const auto& rope : context.ropes) {
    const RopeFactorsArgs args{inputs.positions,
                               rope->inv_freq.data(),
                               rope->attention_factor,
                               inputs.num_tokens,
                               rope->head_dim(),
                               reinterpret_cast<float*>(rope->factors.data())};
    rope_factors(args, first, end);
  }
}

void NormNode::run_rows(StepContext& context, int first, int end, std::byte* out,
                        ThreadScratch& scratch) const {
  const Buffer& target = context.buffers[size_t(this->out())];
  const RmsNormArgs args{context.floats(in_),
                         nullptr,
                         weight_.data(),
                         eps_,
                         context.num_rows(this->out()),
                         target.width,
                         target.format,
                         out,
                         target.row_bytes()};
  context.row_ops.rms_norm(args, first, end, reinterpret_cast<float*>(scratch.workspace.data()));
}

void ConvertNode::run_rows(StepContext& context, int first, int end, std::byte* out,
                           ThreadScratch&) const {
  const Buffer& target = context.buffers[size_t(this->out())];
  const ConvertRowsArgs args{context.floats(in_), context.num_rows(this->out()), target.width,
                             target.format,       out,                           target.row_bytes()};
  context.row_ops.convert_rows(args, first, end);
}

JoinNode::JoinNode(std::vector<JoinedPart> parts, KeptRows* kept, int out)
    : RowNode(out), parts_(std::move(parts)), kept_(kept) {
  const auto whole_lines = [](int width) { return (size_t(width) + 15) / 16 * 16; };
  for (const JoinedPart& part : parts_) {
    width_ += part.width;
    norm_floats_ = std::max(norm_floats_, whole_lines(part.width));
  }
  joined_floats_ = whole_lines(width_);
}

void JoinNode::run_rows(StepContext& context, int first, int end, std::byte* out,
                        ThreadScratch& scratch) const {
  const Buffer& target = context.buffers[size_t(this->out())];
  float* const joined = reinterpret_cast<float*>(scratch.workspace.data());
  float* const norm_scratch = joined + joined_floats_;
  for (int row = first; row < end; ++row) {
    float* place = joined;
    for (const JoinedPart& part : parts_) {
      float* const source = part.in < 0
                                ? kept_->row(context.inputs.kept_rows[row]) + part.kept_column
                                : context.floats(part.in) + size_t(row) * size_t(part.width);
      const size_t bytes = sizeof(float) * size_t(part.width);
      if (part.weight.empty()) {
        std::memcpy(place, source, bytes);
      } else {
        const RmsNormArgs args{source, nullptr,        part.weight.data(),
                               part.eps, 1,            part.width,
                               RowFormat::f32, reinterpret_cast<std::byte*>(place), bytes};
        context.row_ops.rms_norm(args, 0, 1, norm_scratch);
      }
      place += part.width;
    }
    context.gemm.write_row(joined, width_, target.format, out + size_t(row) * target.row_bytes());
  }
}

int KeepRowsNode::num_tiles(const StepContext& context) const {
  return row_tiles(context.num_rows(in_));
}

void KeepRowsNode::run_tile(StepContext& context, int tile, ThreadScratch&) const {
  const int first = tile * kTileRows, end = std::min(first + kTileRows, context.num_rows(in_));
  const size_t width = size_t(context.buffers[size_t(in_)].width);
  for (int row = first; row < end; ++row)
    std::memcpy(kept_->row(row) + column_, context.floats(in_) + size_t(row) * width,
                sizeof(float) * width);
}

int TakeRowsNode::num_tiles(const StepContext& context) const {
  return row_tiles(context.num_rows(out_));
}

void TakeRowsNode::run_tile(StepContext& context, int tile, ThreadScratch&) const {
  const int first = tile * kTileRows, end = std::min(first + kTileRows, context.num_rows(out_));
  const TakeRowsArgs args{context.data(in_), context.inputs.logit_rows, context.num_rows(out_),
                          context.buffers[size_t(in_)].row_bytes(), context.data(out_)};
  take_rows(args, first, end);
}

std::string GemmNode::label() const {
  return "matrix " + std::to_string(matrix_.n) + " x " + std::to_string(matrix_.k);
}

GemmArgs GemmNode::args(const StepContext& context, const std::byte* rows) const {
  return {&matrix_,
          rows,
          context.buffers[size_t(in_)].row_bytes(),
          context.num_rows(out_),
          epilogue_,
          context.data(out_),
          context.buffers[size_t(out_)].row_bytes()};
}

int GemmNode::num_tiles(const StepContext& context) const {
  return context.num_rows(out_) ? gemm_num_tiles(args(context, nullptr)) : 0;
}

void GemmNode::run_tile(StepContext& context, int tile, ThreadScratch& scratch) const {
  run_tile_on(context, tile, context.data(in_), scratch);
}

void GemmNode::run_tile_on(StepContext& context, int tile, const std::byte* rows,
                           const ThreadScratch& scratch) const {
  GemmArgs own = args(context, rows);
  if (scratch.reads_next != gemm_tile_weights(own, tile)) own.next = scratch.reads_next;
  context.gemm.run(own, tile);
}

const std::byte* GemmNode::reads_first(const StepContext& context, int tile) const {
  return gemm_tile_weights(args(context, nullptr), tile);
}

HeadRows AttentionSpec::heads(const StepContext& context) const {
  const auto pointer = [](const std::vector<float>& values) {
    return values.empty() ? nullptr : values.data();
  };
  const float* factors =
      rope < 0 ? nullptr
               : reinterpret_cast<const float*>(context.ropes[size_t(rope)]->factors.data());
  return {shape,    context.floats(fused), pointer(query_norm), pointer(key_norm),
          norm_eps, factors};
}

KvWriteArgs WriteKvNode::args(const StepContext& context) const {
  return {spec_.heads(context), context.kv->layer(spec_.layer), context.inputs.slots,
          context.plans[size_t(spec_.plan)].get(), context.inputs.num_tokens};
}

int WriteKvNode::num_tiles(const StepContext& context) const {
  if (context.plans[size_t(spec_.plan)]->writes_kv()) return 0;
  return context.attention.num_write_tiles(args(context));
}

void WriteKvNode::run_tile(StepContext& context, int tile, ThreadScratch&) const {
  context.attention.write_kv(args(context), tile);
}

int AttentionNode::num_tiles(const StepContext& context) const {
  return context.plans[size_t(spec_.plan)]->num_tiles();
}

void AttentionNode::run_tile(StepContext& context, int tile, ThreadScratch& scratch) const {
  const int next_tile = tile + context.num_threads;
  const Buffer& target = context.buffers[size_t(spec_.out)];
  const AttentionArgs args{spec_.heads(context),
                           context.kv->layer(spec_.layer),
                           context.inputs.slots,
                           context.plans[size_t(spec_.plan)].get(),
                           spec_.scale,
                           target.format,
                           context.data(spec_.out),
                           target.row_bytes(),
                           next_tile < num_tiles(context) ? next_tile : -1,
                           scratch.reads_next};
  context.attention.attend(args, tile, scratch.workspace.data());
}

size_t AttentionNode::workspace_bytes(const StepContext& context) const {
  return context.attention.scratch_bytes(spec_.shape, context.kv->shape().format);
}

}  // namespace tf
