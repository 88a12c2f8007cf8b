#include "deal.h"

// Deals experts that wait in host memory out to their slots, and hands on which slots the pairs of a window use. It writes to
// inputs, the fields of the slots: what reads them comes after where it has the output, or a later graph, to wait for.
// orders: whose they are and how many experts there are, which are HEAD numbers, the slot of each of EXPERTS, then that of
// each pair. ticket: who asks, and for how many pairs. One that the orders are not for, because what was promised was given
// up, writes to no slot and gives slot 0. staged: a record of WORDS for each expert, in which field i begins at STARTi.
uint row = threadgroup_position_in_grid.y;
uint word = thread_position_in_grid.x;
bool mine = orders[0] == ticket[0];

if (row == 0 && word < ticket[1]) {
  slots[word] = mine ? orders[HEAD + EXPERTS + word] : 0;
}
if (mine && row < orders[1] && word < uint(WORDS)) {
  uint value = staged[size_t(row) * WORDS + word];
  size_t slot = orders[HEAD + row];
  put<SIZE0>(field0, slot, word - START0, value);
  put<SIZE1>(field1, slot, word - START1, value);
  put<SIZE2>(field2, slot, word - START2, value);
  put<SIZE3>(field3, slot, word - START3, value);
  put<SIZE4>(field4, slot, word - START4, value);
  put<SIZE5>(field5, slot, word - START5, value);
  put<SIZE6>(field6, slot, word - START6, value);
  put<SIZE7>(field7, slot, word - START7, value);
  put<SIZE8>(field8, slot, word - START8, value);
  put<SIZE9>(field9, slot, word - START9, value);
  put<SIZE10>(field10, slot, word - START10, value);
  put<SIZE11>(field11, slot, word - START11, value);
}
