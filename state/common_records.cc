// SPDX-License-Identifier: Apache-2.0
// Converts the common values of a state dict to records: one for each shared value, one for the
// content metadata, one for the layer names of each stacked tensor, and one for all of a rank's own
// values.
#include "state/common_records.h"

#include "index/records/layer_names.h"
#include "index/records/record_coding.h"

namespace tensormount {

CommonValues SharedCommonRecords(const StateDict& state) {
  CommonValues records = state.common();
  if (const CommonDict* content = state.content_metadata()) {
    records.emplace(kContentMetadataRecord, *content);
  }
  for (const auto& [key, pattern] : state.layer_names()) {
    records.emplace(std::string(kLayersRecordPrefix) + key, pattern);
  }
  return records;
}

Result<std::optional<std::pair<std::string, CommonValue>>> RankCommonRecord(const StateDict& state,
                                                                            int rank) {
  using Record = std::optional<std::pair<std::string, CommonValue>>;
  if (state.rank_common().empty()) return Record();
  CommonValue dict = DictOf(state.rank_common());
  if (Status status = CheckCommon(dict); !status.ok()) {
    return status.WithContext("the per-rank common values");
  }
  return Record(std::in_place, RankRecordName(rank), std::move(dict));
}

}  // namespace tensormount
