/* SPDX-License-Identifier: Apache-2.0 */
/* One mapped world per process, and a consistent snapshot of one of its boards. */
#ifndef NVML_SIM_VIEW_H
#define NVML_SIM_VIEW_H

#include <time.h>

#include "abi.h"

extern Header *world;

typedef struct {
    State state;
    Board *board;
    int64_t now_ns; /* the time at which the state, and thus the answer of the query, is valid */
    unsigned index;
    unsigned mig; /* 0: the board itself, else instance number + 1 */
    int locked_fd; /* of a change: the world file, locked as world.py locks it */
} View;

int64_t clock_ns(clockid_t clock);

nvmlDevice_t handle_for(unsigned board, unsigned mig_plus_one);

/* A query of one device starts in begin() or begin_board(), which refuses MIG devices, one of the system
 * in begin_system(), and each ends in done(): the lock keeps the mapping alive in between. */
nvmlReturn_t begin(nvmlDevice_t device, View *view, const void *out);
nvmlReturn_t begin_board(nvmlDevice_t device, View *view, const void *out);
nvmlReturn_t begin_system(const void *out);
nvmlReturn_t done(nvmlReturn_t result);

/* Reads board `view->index` as a query: counted, delayed, and refused if the board is lost. */
nvmlReturn_t fill_view(View *view);

/* Publishes `view->state`, which a query took in begin_change(), and lets other writers continue. */
nvmlReturn_t begin_change(nvmlDevice_t device, View *view);
nvmlReturn_t end_change(View *view, nvmlReturn_t result);

/* Reads the board without counting as a query. */
void take_snapshot(View *view);

nvmlReturn_t copy_text(char *out, unsigned length, const char *text);

#endif
