#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace tf {

namespace {

// Beyond this many rows, waiting costs less than computing all of them in every thread.
constexpr int kMostRepeatedRows = 4;

}  // namespace

int Program::add_buffer(RowFormat format, int width, bool per_logit_row) {
  context_.buffers.push_back({format, width, per_logit_row, {}});
  return int(context_.buffers.size()) - 1;
}

int Program::add_rope(std::vector<float> inv_freq, float attention_factor) {
  context_.ropes.push_back(
      std::make_unique<RopeFactors>(RopeFactors{std::move(inv_freq), attention_factor, {}}));
  return int(context_.ropes.size()) - 1;
}

int Program::plan(const HeadShape& shape, int window) {
  for (size_t index = 0; index < context_.plans.size(); ++index) {
    const HeadShape& known = context_.plans[index]->shape();
    if (context_.plan_windows[index] == window && known.num_heads == shape.num_heads &&
        known.num_kv_heads == shape.num_kv_heads && known.head_dim == shape.head_dim)
      return int(index);
  }
  context_.plans.push_back(std::make_unique<AttentionPlan>(shape));
  context_.plan_windows.push_back(window);
  return int(context_.plans.size()) - 1;
}

void Program::add(std::unique_ptr<RowNode> node, std::unique_ptr<GemmNode> matrix) {
  nodes_.push_back({std::move(node), std::move(matrix)});
}

void Program::add_keep_rows(std::unique_ptr<KeepRowsNode> node) {
  keep_nodes_.push_back(node.get());
  add(std::move(node));
}

void Program::set_head(const PackedMatrix& matrix, int hidden) {
  head_ = matrix;
  hidden_ = hidden;
}

void Program::run(const StepInputs& inputs, KvCache& kv) {
  prepare(inputs, kv);
  plan_phases();
  run_phases();
}

void Program::run_one_by_one(const StepInputs& inputs, KvCache& kv) {
  prepare(inputs, kv);
  const auto run_alone = [&](const Node& node) {
    const int num_tiles = node.num_tiles(context_);
    phases_.assign(1, {&node, nullptr});
    tiles_of_phase_.assign(1, num_tiles);
    if (num_tiles) run_phases();
  };
  for (const Step& step : nodes_) {
    run_alone(*step.node);
    if (step.matrix) run_alone(*step.matrix);
  }
}

std::vector<std::pair<std::string, double>> Program::profile(const StepInputs& inputs,
                                                             KvCache& kv) {
  using Clock = std::chrono::steady_clock;
  prepare(inputs, kv);
  plan_phases();
  const std::vector<Phase> phases = phases_;
  const std::vector<int> tiles = tiles_of_phase_;
  std::vector<std::pair<std::string, double>> seconds;
  for (size_t phase = 0; phase < phases.size(); ++phase) {
    phases_.assign(1, phases[phase]);
    tiles_of_phase_.assign(1, tiles[phase]);
    const Clock::time_point start = Clock::now();
    run_phases();
    seconds.emplace_back(phases[phase].node->label(),
                         std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

void Program::logits(int start, int stop, float* out) {
  GemmArgs args{&*head_,
                context_.data(hidden_),
                context_.buffers[size_t(hidden_)].row_bytes(),
                stop - start,
                Epilogue::store_f32,
                out,
                sizeof(float) * size_t(head_->n)};
  args.rows += size_t(start) * args.row_bytes;
  struct Head final : TileRunner {
    Head(const StepContext& context, const GemmArgs& args) : context(context), args(args) {}
    void run_tile(int, int tile, int) override {
      GemmArgs own = args;
      own.next = gemm_weights_after(args, tile, context.num_threads);
      context.gemm.run(own, tile);
    }
    const StepContext& context;
    const GemmArgs& args;
  } head(context_, args);
  const int num_tiles = gemm_num_tiles(args);
  team_->run({&num_tiles, 1}, head);
}

void Program::greedy(int64_t* columns, float* shares) {
  const int num_rows = context_.inputs.num_logit_rows;
  if (num_rows == 0) return;
  scores_.reserve(sizeof(float) * size_t(num_rows) * size_t(head_->n));
  const float* const scores = reinterpret_cast<const float*>(scores_.data());
  logits(0, num_rows, reinterpret_cast<float*>(scores_.data()));
  struct Choice final : TileRunner {
    void run_tile(int, int row, int) override {
      const float* const own = scores + size_t(row) * size_t(num_columns);
      columns[row] = kernels.argmax(own, num_columns);
      shares[row] = std::exp(own[columns[row]] - kernels.logsumexp(own, num_columns));
    }
    Choice(const SamplingKernels& kernels, const float* scores, int64_t num_columns,
           int64_t* columns, float* shares)
        : kernels(kernels),
          scores(scores),
          num_columns(num_columns),
          columns(columns),
          shares(shares) {}
    const SamplingKernels& kernels;
    const float* scores;
    const int64_t num_columns;
    int64_t* columns;
    float* shares;
  } choice(context_.sampling, scores, head_->n, columns, shares);
  if (num_rows == 1)
    choice.run_tile(0, 0, 0);  // Not worth waking the others.
  else
    team_->run({&num_rows, 1}, choice);
}

size_t Program::buffer_bytes() const {
  size_t bytes = scores_.size();
  for (const Buffer& buffer : context_.buffers) bytes += buffer.bytes.size();
  for (const auto& rope : context_.ropes) bytes += rope->factors.size();
  for (const ThreadScratch& scratch : scratch_)
    bytes += scratch.rows.size() + scratch.workspace.size();
  return bytes;
}

void Program::prepare(const StepInputs& inputs, KvCache& kv) {
  context_.inputs = inputs;
  context_.kv = &kv;
  for (int copy = 0; copy < inputs.num_block_copies; ++copy)
    kv.copy_block(inputs.block_copies[2 * copy], inputs.block_copies[2 * copy + 1]);
  for (size_t index = 0; index < context_.buffers.size(); ++index) {
    Buffer& buffer = context_.buffers[index];
    buffer.bytes.reserve(size_t(context_.num_rows(int(index))) * buffer.row_bytes());
  }
  for (const KeepRowsNode* node : keep_nodes_) node->make_room(context_);
  for (const auto& rope : context_.ropes)
    rope->factors.reserve(sizeof(float) * size_t(inputs.num_tokens) * size_t(rope->head_dim()));
  const AttentionStep step{inputs.num_sequences, inputs.query_starts, inputs.context_lens,
                           inputs.block_tables, inputs.table_width};
  for (size_t index = 0; index < context_.plans.size(); ++index)
    context_.plans[index]->build(step, context_.plan_windows[index], team_->num_threads());
  reserve_scratch();
}

void Program::reserve_scratch() {
  size_t workspace = 0, rows = 0;
  for (const Step& step : nodes_)
    workspace = std::max(workspace, step.node->workspace_bytes(context_));
  for (const Buffer& buffer : context_.buffers)
    rows = std::max(rows, buffer.row_bytes() * kMostRepeatedRows);
  scratch_.resize(size_t(team_->num_threads()));
  for (ThreadScratch& scratch : scratch_) {
    scratch.workspace.reserve(workspace);
    scratch.rows.reserve(rows);
  }
}

void Program::plan_phases() {
  phases_.clear();
  tiles_of_phase_.clear();
  const auto add_phase = [&](const Node& node, const RowNode* own_input) {
    if (const int num_tiles = node.num_tiles(context_)) {
      phases_.push_back({&node, own_input});
      tiles_of_phase_.push_back(num_tiles);
    }
  };
  for (const Step& step : nodes_) {
    if (!step.matrix) {
      add_phase(*step.node, nullptr);
      continue;
    }
    const auto& rows = static_cast<const RowNode&>(*step.node);
    const bool repeated = context_.num_rows(rows.out()) <= kMostRepeatedRows;
    if (!repeated) add_phase(rows, nullptr);
    add_phase(*step.matrix, repeated ? &rows : nullptr);
  }
}

void Program::run_phases() {
  team_->run(tiles_of_phase_, *this);
  num_phases_before_ += phases_.size();
}

const std::byte* Program::upcoming(int phase, int tile) const {
  const int num_threads = context_.num_threads;
  for (tile += num_threads; size_t(phase) < phases_.size(); ++phase) {
    const int num_tiles = tiles_of_phase_[size_t(phase)];
    if (tile < num_tiles)
      if (const std::byte* first = phases_[size_t(phase)].node->reads_first(context_, tile))
        return first;
    tile = std::max(tile - num_tiles, 0) % num_threads;
  }
  return nullptr;
}

void Program::run_tile(int phase, int tile, int thread) {
  const Phase& running = phases_[size_t(phase)];
  ThreadScratch& scratch = scratch_[size_t(thread)];
  scratch.reads_next = upcoming(phase, tile);
  if (!running.own_input) {
    running.node->run_tile(context_, tile, scratch);
    return;
  }
  const uint64_t serial = num_phases_before_ + uint64_t(phase) + 1;
  if (scratch.prepared_phase != serial) {
    const int num_rows = context_.num_rows(running.own_input->out());
    running.own_input->run_rows(context_, 0, num_rows, scratch.rows.data(), scratch);
    scratch.prepared_phase = serial;
  }
  const auto& matrix = static_cast<const GemmNode&>(*running.node);
  matrix.run_tile_on(context_, tile, scratch.rows.data(), scratch);
}

}  // namespace tf
