// SPDX-License-Identifier: Apache-2.0
// The records that the common values of a state are stored as: one for each shared value, one for
// the content metadata and one for the layer names of a stacked tensor; all of a rank's own values
// are one record.
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
    return status.WithContext("the common values of this rank alone");
  }
  return Record(std::in_place, RankRecordName(rank), std::move(dict));
}

}  // namespace tensormount
