// What a program is made of: one node per pass over a step's rows.
//
// A node cuts its work into tiles that do not depend on each other. It holds weights and the numbers
// of its buffers, and keeps nothing between steps.
#pragma once

#include <string>
#include <vector>

#include "kept_rows.h"
#include "step_context.h"

namespace tf {

class Node {
 public:
  virtual ~Node() = default;
  virtual std::string label() const = 0;
  // 0 when the step has nothing for this node.
  virtual int num_tiles(const StepContext& context) const = 0;
  virtual void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const = 0;
  virtual size_t workspace_bytes(const StepContext&) const { return 0; }
  // Where a tile begins to read what is in no cache yet, such as weights; null: nowhere.
  virtual const std::byte* reads_first(const StepContext&, int) const { return nullptr; }
};

// A node that turns each row by itself into a row of `out`, so that where rows are few every thread
// may compute all of them for itself instead of waiting for the others.
class RowNode : public Node {
 public:
  explicit RowNode(int out) : out_(out) {}
  int out() const { return out_; }
  int num_tiles(const StepContext& context) const final;
  void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const final;
  // `out` holds row 0.
  virtual void run_rows(StepContext& context, int first, int end, std::byte* out,
                        ThreadScratch& scratch) const = 0;

 private:
  int out_;
};

// Token ids to rows, and the rotary factors of their positions.
class EmbedNode final : public Node {
 public:
  EmbedNode(const PackedMatrix& table, int out) : packed_(table), is_packed_(true), out_(out) {}
  EmbedNode(const void* table, TableFormat format, int out)
      : plain_(table), plain_format_(format), out_(out) {}
  std::string label() const override { return "embed"; }
  int num_tiles(const StepContext& context) const override;
  void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const override;

 private:
  PackedMatrix packed_{};
  bool is_packed_ = false;
  const void* plain_ = nullptr;
  TableFormat plain_format_ = TableFormat::f32;
  int out_;
};

class NormNode final : public RowNode {
 public:
  NormNode(int in, std::vector<float> weight, float eps, int out)
      : RowNode(out), in_(in), weight_(std::move(weight)), eps_(eps) {}
  std::string label() const override { return "norm"; }
  void run_rows(StepContext& context, int first, int end, std::byte* out,
                ThreadScratch& scratch) const override;
  size_t workspace_bytes(const StepContext&) const override {
    return sizeof(float) * (weight_.size() + 64);
  }

 private:
  int in_;
  std::vector<float> weight_;
  float eps_;
};

class ConvertNode final : public RowNode {
 public:
  ConvertNode(int in, int out) : RowNode(out), in_(in) {}
  std::string label() const override { return "convert"; }
  void run_rows(StepContext& context, int first, int end, std::byte* out,
                ThreadScratch& scratch) const override;

 private:
  int in_;
};

// A piece of a joined row: float rows of a buffer or of kept rows, normed or as they are.
struct JoinedPart {
  int in;                     // buffer; -1: kept rows
  int kept_column;            // where the piece begins in a kept row
  int width;
  std::vector<float> weight;  // of the norm; empty: none
  float eps;
};

// Pieces side by side as one row in any form.
class JoinNode final : public RowNode {
 public:
  // `kept` may be null where no part reads it.
  JoinNode(std::vector<JoinedPart> parts, KeptRows* kept, int out);
  std::string label() const override { return "join"; }
  void run_rows(StepContext& context, int first, int end, std::byte* out,
                ThreadScratch& scratch) const override;
  size_t workspace_bytes(const StepContext&) const override {
    return sizeof(float) * (joined_floats_ + norm_floats_);
  }

 private:
  std::vector<JoinedPart> parts_;
  KeptRows* kept_;
  int width_ = 0;
  size_t joined_floats_, norm_floats_ = 0;
};

// Copies rows to where they outlive the step, from column `column` on.
class KeepRowsNode final : public Node {
 public:
  KeepRowsNode(int in, KeptRows* kept, int column) : in_(in), kept_(kept), column_(column) {}
  std::string label() const override { return "keep rows"; }
  int num_tiles(const StepContext& context) const override;
  void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const override;
  void make_room(const StepContext& context) const { kept_->resize(context.num_rows(in_)); }

 private:
  int in_;
  KeptRows* kept_;
  int column_;
};

class TakeRowsNode final : public Node {
 public:
  TakeRowsNode(int in, int out) : in_(in), out_(out) {}
  std::string label() const override { return "take rows"; }
  int num_tiles(const StepContext& context) const override;
  void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const override;

 private:
  int in_, out_;
};

class GemmNode final : public Node {
 public:
  GemmNode(const PackedMatrix& matrix, int in, Epilogue epilogue, int out)
      : matrix_(matrix), in_(in), epilogue_(epilogue), out_(out) {}
  std::string label() const override;
  int num_tiles(const StepContext& context) const override;
  void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const override;
  const std::byte* reads_first(const StepContext& context, int tile) const override;
  // With rows of the input that lie elsewhere than in its buffer.
  void run_tile_on(StepContext& context, int tile, const std::byte* rows,
                   const ThreadScratch& scratch) const;

 private:
  GemmArgs args(const StepContext& context, const std::byte* rows) const;

  PackedMatrix matrix_;
  int in_;
  Epilogue epilogue_;
  int out_;
};

// How a layer's fused rows become its attention.
struct AttentionSpec {
  HeadShape shape;
  int layer;
  int fused;                      // buffer
  std::vector<float> query_norm;  // empty: none
  std::vector<float> key_norm;
  float norm_eps;
  int rope;  // -1: no turn
  int plan;
  float scale;
  int out;

  HeadRows heads(const StepContext& context) const;
};

class WriteKvNode final : public Node {
 public:
  explicit WriteKvNode(const AttentionSpec& spec) : spec_(spec) {}
  std::string label() const override { return "write KV"; }
  int num_tiles(const StepContext& context) const override;
  void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const override;

 private:
  KvWriteArgs args(const StepContext& context) const;
  AttentionSpec spec_;
};

class AttentionNode final : public Node {
 public:
  explicit AttentionNode(const AttentionSpec& spec) : spec_(spec) {}
  std::string label() const override { return "attention"; }
  int num_tiles(const StepContext& context) const override;
  void run_tile(StepContext& context, int tile, ThreadScratch& scratch) const override;
  size_t workspace_bytes(const StepContext& context) const override;

 private:
  AttentionSpec spec_;
};

}  // namespace tf
