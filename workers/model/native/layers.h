// All layers of a decoder of the common shape, one after the other: norm, queries with keys and
// values, rotate and store, attention, output, norm, gates, output. Nothing else runs in between, and
// nothing is allocated. workers/model/fusion/stack.py has the same structs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "linear.h"
#include "rows.h"
#include "turn.h"

namespace {

// One layer: norm weights, panels, KV and attention flags.
template <class T>
struct Layer {
  const T *before_attention, *q_norm, *k_norm, *before_mlp;
  Weights qkv, out, gate_up, down;
  T *keys, *values;
  const float* sinks;
  int64_t window;
  float attention_eps, head_eps, mlp_eps, scale, softcap;
};

// Shared by all layers.
struct Sizes {
  int64_t hidden, num_heads, kv_heads, dim, inner, rotary;
};

// One step. Tiles as in attend; the last layer's tiles cover only the wanted rows.
template <class T>
struct Step {
  int64_t rows, num_wanted, num_tiles, num_last_tiles;
  T* x;                    // (rows, hidden), is overwritten
  T* found;                // (num_wanted, hidden)
  const T *cos, *sin;      // (rows, rotary)
  const int64_t* kept_at;  // (rows,): slots of the cache
  const int64_t *slots, *tiles, *last_tiles, *wanted;
  T *normed, *qkv, *attended, *inner;  // room: (rows, hidden), …
};

template <class T>
void gather(const T* from, const int64_t* rows, int64_t num_rows, int64_t dim, T* to) {
  for (int64_t i = 0; i < num_rows; i++)
    std::memcpy(to + i * dim, from + rows[i] * dim, dim * sizeof(T));
}

template <class T>
void attend_layer(const Layer<T>& layer, const Sizes& s, const Step<T>& step, const int64_t* tiles,
                  int64_t num_tiles) {
  attend<T>(tiles, num_tiles, step.slots, step.qkv, (s.num_heads + 2 * s.kv_heads) * s.dim,
            layer.keys, layer.values, step.attended, s.num_heads, s.kv_heads, s.dim, s.dim,
            Flags{layer.scale, layer.softcap, layer.window, layer.sinks});
}

// The part after attention; reads x (rows, hidden) and adds to it.
template <class T>
void end_layer(const Layer<T>& layer, const Sizes& s, const Step<T>& step, const T* attended, T* x,
               int64_t rows) {
  const int64_t width = s.num_heads * s.dim;
  linear(Product<T>{attended, layer.out, x, nullptr, x, nullptr, width, rows, width, s.hidden, 0,
                    false});
  linear(Product<T>{x, layer.gate_up, nullptr, layer.before_mlp, step.inner, step.normed, s.hidden,
                    rows, s.hidden, s.inner, layer.mlp_eps, true});
  linear(Product<T>{step.inner, layer.down, x, nullptr, x, nullptr, s.inner, rows, s.inner,
                    s.hidden, 0, false});
}

template <class T>
void run_layers(const Layer<T>* layers, int64_t num_layers, const Sizes& s, const Step<T>& step) {
  const int64_t width = (s.num_heads + 2 * s.kv_heads) * s.dim;
  for (int64_t number = 0; number < num_layers; number++) {
    const Layer<T>& layer = layers[number];
    linear(Product<T>{step.x, layer.qkv, nullptr, layer.before_attention, step.qkv, step.normed,
                      s.hidden, step.rows, s.hidden, width, layer.attention_eps, false});
    rotate_and_keep(step.qkv, step.rows, s.num_heads, s.kv_heads, s.dim, step.cos, step.sin,
                    s.rotary, layer.q_norm, layer.k_norm, layer.head_eps, step.kept_at, layer.keys,
                    layer.values);
    if (number + 1 < num_layers) {
      attend_layer(layer, s, step, step.tiles, step.num_tiles);
      end_layer(layer, s, step, step.attended, step.x, step.rows);
    } else if (step.num_wanted) {
      attend_layer(layer, s, step, step.last_tiles, step.num_last_tiles);
      gather(step.attended, step.wanted, step.num_wanted, s.num_heads * s.dim, step.qkv);
      gather(step.x, step.wanted, step.num_wanted, s.hidden, step.found);
      end_layer(layer, s, step, step.qkv, step.found, step.num_wanted);
    }
  }
}

}  // namespace
