// Where a plan is made: a quick one on the loop itself, which saves two changes of thread; any other on a
// pool thread, so that it holds up nobody. What is quick is learnt, by layer, from how long its last plans
// took. Pure; the caller keeps threads apart.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "controller/planner/problem.h"

namespace lrmoe {

class PlanPlace {
 public:
  // A layer whose last kEnough plans of the same size took `max_loop_us` or less each is planned on the loop,
  // until one takes longer. 0: never.
  explicit PlanPlace(int64_t max_loop_us) : max_loop_us_(max_loop_us) {}

  bool OnLoop(int32_t layer, const planner::PlanningProblem& problem) const;
  // A plan of `layer` took this much processor time.
  void Took(int32_t layer, const planner::PlanningProblem& problem, double cpu_us);

  static constexpr int32_t kEnough = 4;

 private:
  struct Past {
    int32_t experts = 0, ranks = 0;
    std::string planner;
    int32_t quick = 0;  // plans in a row, up to kEnough
    bool Fits(const planner::PlanningProblem& problem) const;
  };
  const int64_t max_loop_us_;
  std::map<int32_t, Past> past_;  // by layer
};

}  // namespace lrmoe
