// SPDX-License-Identifier: Apache-2.0
// Validate of tensormount/validate.h: runs only the layout exchange of a save.
#include "tensormount/validate.h"

#include "collective/comm/collective.h"
#include "collective/layout/layout_exchange.h"

namespace tensormount {

Result<LayoutReport> Validate(const StateDict& state, Communicator& comm,
                              const ValidateOptions& options) {
  Collective collective(comm, options.timeouts, options.cancel);
  CallDescription call;
  call.options = {{"call", "Validate"}};
  call.limit = options.limit;
  call.plan = false;
  TENSORMOUNT_ASSIGN_OR_RETURN(JobLayout job, ExchangeLayouts(collective, state, call));
  return std::move(job.report);
}

}  // namespace tensormount
