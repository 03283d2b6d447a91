// A model's step, recorded once and replayed for every step in one call.
//
// Nodes run in the order in which they were added, each on all threads. Where a step has few rows, a
// node that works row by row is not run as a phase of its own: every thread computes the rows for
// itself when it takes up the matrix that reads them, which costs less than waiting for the others.
// That changes no bit, nor does `run_one_by_one`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "program_nodes.h"
#include "thread_team.h"

namespace tf {

class Program final : private TileRunner {
 public:
  Program(Isa isa, std::shared_ptr<ThreadTeam> team)
      : context_(isa, team->num_threads()), team_(std::move(team)) {}

  int add_buffer(RowFormat format, int width, bool per_logit_row);
  int add_rope(std::vector<float> inv_freq, float attention_factor);
  // The plan of all attentions with this shape and window (0: none).
  int plan(const HeadShape& shape, int window);

  void add(std::unique_ptr<Node> node) { nodes_.push_back({std::move(node), nullptr}); }
  // `node`, whose rows nothing but `matrix` reads.
  void add(std::unique_ptr<RowNode> node, std::unique_ptr<GemmNode> matrix);
  void add_keep_rows(std::unique_ptr<KeepRowsNode> node);
  // What `logits` multiplies; reads float rows from nothing but `hidden`.
  void set_head(const PackedMatrix& matrix, int hidden);

  int num_nodes() const { return int(nodes_.size()); }
  int num_phases() const { return int(phases_.size()); }
  const StepContext& context() const { return context_; }

  // `inputs` and what they point to are used until `run` returns, `kv` is written.
  void run(const StepInputs& inputs, KvCache& kv);
  // The reference: every node by itself and complete before the next one begins.
  void run_one_by_one(const StepInputs& inputs, KvCache& kv);
  // One step, phase after phase: what each of them took.
  std::vector<std::pair<std::string, double>> profile(const StepInputs& inputs, KvCache& kv);
  // f32 [stop - start][head columns] of the last run's rows of logits.
  void logits(int start, int stop, float* out);

  // Of each of the last run's rows of logits: the column of the largest, the lowest among equals,
  // and its share of the softmax.
  void greedy(int64_t* columns, float* shares);

  size_t buffer_bytes() const;

 private:
  struct Step {
    std::unique_ptr<Node> node;
    // Reads what `node`, then a RowNode, makes.
    std::unique_ptr<GemmNode> matrix;
  };
  struct Phase {
    const Node* node;
    const RowNode* own_input;  // computed by each thread for itself; null: by an earlier phase
  };

  void prepare(const StepInputs& inputs, KvCache& kv);
  void plan_phases();
  void reserve_scratch();
  void run_phases();
  void run_tile(int phase, int tile, int thread) override;
  // What a thread probably reads after `tile`, tiles being claimed in turn; null: nothing.
  const std::byte* upcoming(int phase, int tile) const;

  StepContext context_;
  std::shared_ptr<ThreadTeam> team_;
  std::vector<Step> nodes_;
  std::vector<const KeepRowsNode*> keep_nodes_;  // of nodes_
  std::vector<Phase> phases_;
  std::vector<int> tiles_of_phase_;
  std::vector<ThreadScratch> scratch_;
  uint64_t num_phases_before_ = 0;
  std::optional<PackedMatrix> head_;
  int hidden_ = -1;
  AlignedBytes scores_;  // what `greedy` chooses from
};

}  // namespace tf
